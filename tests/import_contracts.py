"""An import-linter contract: the layers may not import the public API, which uses them.

The stock `layers` contract needs the name of each module of the top layer. Here the top layer is every module of the
package outside the lower layers, so a new API module is covered immediately.
"""

from __future__ import annotations

from typing import cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class BelowTheApi(Contract):  # type: ignore[misc]
    """No module under `layers` may import a module of `package` that is outside all of them."""

    type_name = "below_the_api"
    package = fields.StringField()
    layers = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Check each direct import of each module of each layer."""
        package, layers = cast(str, self.package), cast(list[str], self.layers)
        below = set(layers).union(*(graph.find_descendants(layer) for layer in layers))
        above = {package, *graph.find_descendants(package)} - below
        upward = sorted(
            (module, imported)
            for module in below
            for imported in graph.find_modules_directly_imported_by(module) & above
        )
        return ContractCheck(kept=not upward, metadata={"upward": upward})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the imports that break the contract."""
        for module, imported in check.metadata["upward"]:
            output.print_error(f"{module} imports {imported}, which stands above it")
