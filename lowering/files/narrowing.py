"""Forms in fewer bits that an array of weights may be stored in: a module without JAX, as messages name them."""

from typing import Literal

#: How an array holds weights, or the scales of weights.
Narrowing = Literal["bfloat16", "int8 by row", "scale by row", "int8 by channel", "scale by channel"]
