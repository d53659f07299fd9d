"""curax report RUN...: the page of a run, or of several side by side."""

import argparse
import sys
from pathlib import Path

from curax.config import ConfigError
from curax.runs import live, page, reading, side_by_side
from curax.runs.rows import NotWrittenError
from curax.settings.cli import Parser, command_line, write_whole, written_to
from curax.settings.errors import out_of_reach

PORT = 8642


def parser() -> Parser:
    """Argument parser of `curax report`."""
    result = Parser(
        "report",
        description="Draw the pictures of a run and write its page, report.html. Of "
        "several runs: one page, pass rates over tokens, updates and seconds.",
    )
    result.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run"
    )
    result.add_argument(
        "--title", help="headline of the page; default: the folder's name"
    )
    result.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="page of several runs (default: side_by_side.html)",
    )
    result.add_argument(
        "--watch",
        action="store_true",
        help="serve the page, renewed while the run goes on; write nothing",
    )
    result.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to serve at (default: this machine)",
    )
    result.add_argument(
        "--port", type=int, default=PORT, help=f"0: any that is free (default: {PORT})"
    )
    return result


@command_line("curax.report")
def main(argv: list[str]) -> int:
    """Exit status: 0 done, 1 not written, 2 bad input, 130 interrupted."""
    options = parser().parse_args(argv)
    try:
        if options.watch:
            return watch(options)
        print(written(options))
    except NotWrittenError as error:
        fix = "mend that, or add --watch, which writes nothing"
        print(f"curax.report: {error}; {fix}.", file=sys.stderr)
        return 1
    except (reading.DamagedError, OSError) as error:
        raise ConfigError(out_of_reach(error) or str(error)) from error
    return 0


def written(options: argparse.Namespace) -> Path:
    """Path of the page that is written.

    Raises:
        ConfigError: wrong input.
        DamagedError: a folder cannot be read.
    """
    if len(options.runs) == 1:
        if options.out:
            raise ConfigError(
                f"--out {options.out}: the page of one run is report.html in its "
                "folder; leave --out away, or name several runs."
            )
        return page.write(options.runs[0], title=options.title)
    named = live.names_of(options.runs).items()
    runs = {name: reading.read(run) for name, run in named}
    path = options.out or Path("side_by_side.html")
    text = side_by_side.render(runs, options.title or f"{len(runs)} runs")
    with written_to(f"--out {path}", "another file"):
        write_whole(path, text)
    return path


def watch(options: argparse.Namespace) -> int:
    """Serve the pages until an interrupt; the exit status, 0.

    Raises:
        ConfigError: a folder is missing, the address cannot be taken, or a file is
            named.
    """
    if options.out:
        raise ConfigError(
            f"--out {options.out}: --watch writes nothing; leave one of them away."
        )
    if not options.host:
        raise ConfigError(
            "--host is empty, which is every address of this machine; name one, as "
            "127.0.0.1, or 0.0.0.0 for all."
        )
    site = live.Site(live.names_of(options.runs), options.title)
    with live.server(site, options.host, options.port) as serves:
        host, port = serves.server_address[:2]
        host = f"[{host}]" if ":" in str(host) else host
        print(f"Serving http://{host}:{port}/ until Ctrl-C.", flush=True)
        try:
            serves.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
