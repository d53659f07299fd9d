"""python -m curax.report RUN: draw the pictures of a run and write report.html."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from curax.runs import page, record
from curax.settings.cli import survives_closed_output


@survives_closed_output
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 the folder cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m curax.report",
        description="Draw the pictures of a run and write its page, report.html.",
    )
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument(
        "--title", help="headline of the page; default: the folder's name"
    )
    options = parser.parse_args(arguments)
    try:
        path = page.write(options.run, title=options.title)
    except (record.RecordError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
