"""Every kind of state with every use of it: each pair equals plain JAX, or is refused with a remedy that works."""
