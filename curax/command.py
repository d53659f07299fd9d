"""What the command lines have in common."""

import argparse
import os
from pathlib import Path
from typing import NoReturn

from curax.places import ConfigError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong."""
        raise ConfigError(f"{message}; {self.prog} --help lists what there is.")

    def add_assignments(self) -> None:
        """The option that changes a config."""
        self.add_argument(
            "--set",
            dest="assignments",
            action="extend",
            nargs="+",
            default=[],
            metavar="NAME=VALUE",
            help="change a field or an option of a function, for example steps=400 "
            "sampling.group_size=16 loss.high=0.3 seeds=8",
        )


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, or leave the one that is there as it is."""
    partial = path.with_name(path.name + ".tmp")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
