"""The command line: `hosted-tinker serve` and `hosted-tinker config`. Parses, calls, prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hosted_tinker import __version__
from hosted_tinker.backend_configs import BACKEND_CONFIGS
from hosted_tinker.config import SECRET_FIELDS, LoadedSettings, load_settings
from hosted_tinker.errors import HostedTinkerError
from hosted_tinker.settings import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 with one sentence on stderr."""
    arguments = vars(make_parser().parse_args(argv))
    command = arguments.pop("command")
    config_path: Path | None = arguments.pop("config", None)
    try:
        loaded = load_settings(arguments, config_path)
        if command == "config":
            print_settings(loaded)
        else:
            # Imported here so that `config` and `--help` answer at once.
            from hosted_tinker.serve import serve  # noqa: PLC0415

            serve(loaded.settings)
    except HostedTinkerError as error:
        print(f"hosted-tinker: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def make_parser() -> argparse.ArgumentParser:
    """A flag for each setting; those that are not given are absent from the result."""
    parser = argparse.ArgumentParser(prog="hosted-tinker", description="Serve the Tinker API.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in {
        "serve": "run the server",
        "config": "print the effective settings, what each means and where it was set",
    }.items():
        command = commands.add_parser(name, help=text, argument_default=argparse.SUPPRESS)
        command.add_argument("--config", type=Path, metavar="TOML", help="file of settings")
        for field, schema in Settings.model_fields.items():
            add_flag(command, field, schema.annotation, schema.description or "")
    return parser


def add_flag(parser: argparse.ArgumentParser, field: str, annotation: Any, text: str) -> None:
    flag = f"--{field.replace('_', '-')}"
    help_text = text.replace("%", "%%")
    if annotation is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=help_text)
    elif annotation == tuple[str, ...]:
        metavar = field.rsplit("_", 1)[-1].upper()
        parser.add_argument(flag, nargs="+", metavar=metavar, help=help_text)
    else:
        parser.add_argument(flag, metavar=field.rsplit("_", 1)[-1].upper(), help=help_text)


def print_settings(loaded: LoadedSettings) -> None:
    """Every setting, the backend's too: its value, where it was set, what it means."""
    table = Table("setting", "value", "set by", "meaning")
    for field, schema in Settings.model_fields.items():
        if field == "backend_config":
            continue
        value = getattr(loaded.settings, field)
        shown = "(hidden)" if field in SECRET_FIELDS and value else str(value)
        table.add_row(field, shown, loaded.origins.get(field, "default"), schema.description)
    backend_config = loaded.settings.backend_config
    for field, schema in BACKEND_CONFIGS[loaded.settings.backend].model_fields.items():
        given = field in backend_config.model_fields_set
        origin = loaded.origins.get("backend_config", "default") if given else "default"
        value = str(getattr(backend_config, field))
        table.add_row(f"backend_config.{field}", value, origin, schema.description)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    sys.exit(main())
