"""A dataset of Hugging Face as blocks of rows, which are tables of Arrow in its files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from dflow.input.arrow_blocks import arrow_columns, schema_types
from dflow.input.file_blocks import Block, FileBlocks, ReadOptions

#: Most rows of a block.
_MOST_ROWS = 1 << 15


class DatasetBlocks(FileBlocks):
    """A `datasets.Dataset`, also one with chosen or shuffled rows; a block is a range of rows."""

    name = "Hugging Face"

    def __init__(self, dataset: Any, options: ReadOptions) -> None:
        super().__init__("dataset", options)
        self._dataset = dataset.with_format("arrow")

    def types(self) -> dict[str, str]:
        return schema_types(self._dataset.features.arrow_schema, self)

    def blocks(self) -> list[Block]:
        count = len(self._dataset)
        return [
            Block(min(_MOST_ROWS, count - start), 0, min(start + _MOST_ROWS, count), start)
            for start in range(0, count, _MOST_ROWS)
        ]

    def columns(self, block: Block, types: Mapping[str, str]) -> dict[str, Any]:
        try:
            table = self._dataset.select_columns([*types])[block.start : block.stop]
        except (pa.ArrowException, OSError) as error:
            raise self.error(str(error).partition("\n")[0], block) from error
        return arrow_columns(table, self, block, types)

    def place(self, block: Block) -> str:
        return f"rows {block.start} to {block.stop - 1}"
