"""python -m curax.report RUN: draw the pictures of a run and write report.html."""

import sys
from collections.abc import Sequence
from pathlib import Path

from curax.config import ConfigError
from curax.runs import page, record
from curax.settings.cli import Parser, program, survives_closed_output


def parser() -> Parser:
    """Argument parser of `python -m curax.report`."""
    result = Parser(
        prog=program("report"),
        allow_abbrev=False,
        description="Draw the pictures of a run and write its page, report.html.",
    )
    result.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    result.add_argument(
        "--title", help="headline of the page; default: the folder's name"
    )
    return result


@survives_closed_output
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 the folder cannot be read."""
    try:
        options = parser().parse_args(arguments)
        path = page.write(options.run, title=options.title)
    except (ConfigError, record.RecordError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
