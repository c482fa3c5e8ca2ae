"""A command line parser: one-line errors with the nearest names, help pages, shell completion."""

import argparse
import dataclasses
import itertools
import re
import shutil
import sys
import textwrap
from argparse import SUPPRESS, Action, HelpFormatter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

from hvdtrain.errors import UsageError
from hvdtrain.host import records
from hvdtrain.options import requests
from hvdtrain.options.givenmodel import beside
from hvdtrain.options.names import folded, instead, nearest, unknown_key
from hvdtrain.options.sections import NO_RULE, Group, Rule

NARROWEST, WIDEST = 40, 100  # columns
OPTION_COLUMNS = 30  # columns for the names of options
SHELLS = ("bash", "zsh")
# The metavars that are completed as paths, with shtab's name for the kind of path.
FILES = {"FILE": "FILE", "SRC": "FILE", "STUDY": "FILE"}
PATHS = FILES | {"DIR": "DIRECTORY", "DEST": "DIRECTORY", "RUN": "DIRECTORY"}


class Formatter(DefaultHelpFormatter):
    """A formatter that shows required options in the usage, and no types or empty defaults."""

    def __init__(self, prog: str, **settings: Any) -> None:
        columns = {"max_help_position": OPTION_COLUMNS, "width": width()}
        super().__init__(prog, **columns | settings)

    def _format_usage(
        self, usage: str | None, actions: Iterable[Action], groups: Any, prefix: str | None
    ) -> str:
        words = [f"{'usage: ' if prefix is None else prefix}{as_typed(self._prog)}"]
        for action in actions:
            if action.required or not action.option_strings:
                values = self._format_args(action, _metavar(action))
                words.append(" ".join([*action.option_strings[:1], values]))
        return " ".join([*words, "[options]"]) + "\n\n"

    def _format_action_invocation(self, action: Action) -> str:
        if is_switch(action):
            value = f" [{action.metavar}]" if action.metavar else ""
            name = action.option_strings[0]
            return f"{name}{value}, --no-{name.removeprefix('--')}"
        return super()._format_action_invocation(action)

    def _get_help_string(self, action: Action) -> str:
        text = action.help or ""
        if action.required and action.option_strings:
            return f"{text} (required)"
        has_none = action.default in (None, [], SUPPRESS) or action.default is False
        if has_none or "(default: " in text:
            return text
        return f"{text} (default: %(default)s)"

    def _get_default_metavar_for_positional(self, action: Action) -> str:
        return _metavar(action)


def is_switch(action: Action) -> bool:
    """Return whether an option may be used without a value, and with `--no-` before its name."""
    return action.const is True and action.nargs == "?"


class SwitchOff(Action):
    """Sets a boolean option to False."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(nargs=0, **settings)

    def __call__(self, parser: Any, namespace: Any, *ignored: Any) -> None:
        """Set the option to False."""
        setattr(namespace, self.dest, False)


def metavar(kind: object) -> str | None:
    """Return the placeholder for a value of a type; None if the type does not imply one."""
    options = [option for option in get_args(kind) if option is not type(None)] or [kind]
    if get_origin(kind) is Literal:
        return f"{{{','.join(map(str, options))}}}"
    if len(options) == 1 and options[0] is not kind:
        return metavar(options[0])
    return {int: "N", float: "X"}.get(options[0])


def as_typed(prog: str) -> str:
    """Return the words of a command, which jsonargparse writes with [options] between them."""
    return prog.replace(" [options]", "")


def subcommands(parser: ArgumentParser) -> dict[str, ArgumentParser]:
    """Return the commands of a command by name; empty if it has none."""
    for action in parser._actions:
        if isinstance(action.choices, dict):
            return dict(action.choices)
    return {}


def overview(parser: ArgumentParser) -> str:
    """Return the help page of a command that has commands, with one line per command."""
    commands = dict(_leaves(parser))
    program = as_typed(parser.prog or "")
    return "\n".join(
        [
            f"usage: {program} COMMAND [options]\n\n{parser.description}\n\ncommands:",
            *_table([(name, _first_sentence(leaf)) for name, leaf in commands.items()]),
            "\noptions:",
            *_table(_options(parser)),
            f"\n`{program} COMMAND --help` lists the options of a command.\n",
        ]
    )


def width() -> int:
    """Return the width of a help page in columns."""
    return max(NARROWEST, min(shutil.get_terminal_size().columns - 2, WIDEST))


def _metavar(action: Action) -> str:
    return str(action.metavar or action.dest.upper())


def _leaves(parser: ArgumentParser, before: str = "") -> Iterator[tuple[str, ArgumentParser]]:
    for name, command in subcommands(parser).items():
        if subcommands(command):
            yield from _leaves(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def _first_sentence(parser: ArgumentParser) -> str:
    return (parser.description or "").partition(". ")[0].removesuffix(".")


def _options(parser: ArgumentParser) -> list[tuple[str, str]]:
    formatter = HelpFormatter("")
    actions = [action for action in parser._actions if action.option_strings]
    shown = [action for action in actions if action.help != SUPPRESS]
    return [(formatter._format_action_invocation(action), action.help or "") for action in shown]


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    column = max(len(name) for name, _ in rows) + 4
    return [
        textwrap.fill(f"  {name:<{column - 2}}{text}", width(), subsequent_indent=" " * column)
        for name, text in rows
    ]


class PrintCompletion(Action):
    """Prints the script of a shell, and ends the process."""

    def __call__(self, parser: Any, namespace: Any, shell: Any, *ignored: Any) -> None:
        """Print the script and exit."""
        print(completion_script(parser, shell))
        sys.exit()  # jsonargparse's parser cannot be used after this


def completion_script(parser: ArgumentParser, shell: str) -> str:
    """Return the script with which a shell completes the words after `hvdtrain`.

    The parser cannot be used after this call.

    Raises:
        UsageError: if shtab, which writes the script, is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise UsageError("--print-completion needs shtab: pip install shtab") from None
    for action in _actions(parser):
        if action.metavar in PATHS:
            action.complete = getattr(shtab, PATHS[action.metavar])  # type: ignore[attr-defined]
        elif isinstance(action, SwitchOff):
            action.help = ""  # shtab leaves out options without help
        elif is_switch(action):
            if action.metavar:  # there are values besides true and false
                action.choices = str(action.metavar).split("|")
            else:
                action.nargs = 0  # else the next word would be completed as its value
    text: str = parser.get_completion_script(f"shtab-{shell}")
    return text


def _actions(parser: ArgumentParser) -> Iterator[Action]:
    yield from parser._actions
    for command in subcommands(parser).values():
        yield from _actions(command)


Options = TypeVar("Options")

MOST_NAMES = 12  # longest list of names in a message
# Names of options in other tools, with the option of hvdtrain that does the same.
OPTION_ALIASES = {
    **dict.fromkeys(("--gpus", "--num-gpus", "--devices", "--gpu"), "--ranks (one per GPU)"),
    **dict.fromkeys(("--np", "--nproc-per-node", "--num-processes", "--world-size"), "--ranks"),
    "--learning-rate": "--lr",
    "--gradient-accumulation-steps": "--microbatches",
    "--accumulate-grad-batches": "--microbatches",
    **dict.fromkeys(("--amp", "--bf16"), "--precision bf16"),
    "--fp16": "--precision fp16",
    **dict.fromkeys(("--output", "--output-dir", "--save-dir", "--logdir"), "--run"),
}
# Options of sbatch without a counterpart in hvdtrain.
# fmt: off
SBATCH_ONLY = {
    "begin", "mem-per-cpu", "mem-per-gpu", "exclusive", "gres", "mail-type", "mail-user",
    "nodelist", "exclude", "hint", "licenses", "reservation", "comment", "tmp", "gpus-per-task",
    "hold", "nice", "priority", "export", "ntasks", "cpus-per-task", "switches", "contiguous",
}
# fmt: on
# Formats of values that are more than text or a number.
VALUE_FORMS = {"--time": requests.TIME_FORMS, "--mem": requests.MEMORY_FORMS}
# Names of values in other tools, with the value that does the same here.
VALUE_ALIASES = {
    "gpu": "cuda",
    **dict.fromkeys(("amp", "bfloat16"), "bf16"),
    **dict.fromkeys(("float16", "half"), "fp16"),
    **dict.fromkeys(("float32", "float", "single"), "fp32"),
    **dict.fromkeys(("float64", "double"), "fp64"),
    "pytorch": "torch",
    **dict.fromkeys(("tf", "keras"), "tensorflow"),
}


class Parser(ArgumentParser):
    """jsonargparse's parser, with errors as `UsageError` instead of a usage page and an exit."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=Formatter, **settings)

    def format_help(self, formatter: argparse.HelpFormatter | None = None) -> str:
        """Return the help page: the options, or the commands of a command that has some."""
        if subcommands(self):
            return overview(self)
        return super().format_help(formatter)

    def print_help(self, file: Any = None) -> None:
        """Print the help page, without the options that only `--help-all` lists."""
        more = [action for action in self._actions if getattr(action, "is_hidden", False)]
        texts = [action.help for action in more]
        for action in more:
            action.help = argparse.SUPPRESS
        page = self.format_help()
        for action, text in zip(more, texts, strict=True):
            action.help = text
        if more:
            page += f"\n`{as_typed(self.prog)} --help-all` lists {len(more)} more options.\n"
        self._print_message(page, file or sys.stdout)

    def parse_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: Namespace | None = None,
        **settings: Any,
    ) -> Namespace:
        """Parse as jsonargparse does, but read files first: the command line wins over them."""
        words = sys.argv[1:] if args is None else list(args)
        if "--config" in self._option_string_actions:
            words = _files_first(words)
        return super().parse_args(words, namespace, **settings)

    def parse_path(self, path: Any, *arguments: Any, **settings: Any) -> Any:
        """Parse a file as jsonargparse does, after checks that it cannot harm the parser."""
        file = Path(path).expanduser()
        text = records.read_text(file)
        values = records.mapping(text, file, "configuration")
        kept = beside(folded(values), file.parent)
        self.check_keys(path, kept)
        if kept != values:
            text = yaml.safe_dump(kept, sort_keys=False)
        return self.parse_string(text, str(path), *arguments, **settings)

    def check_keys(self, source: object, values: Mapping[Any, Any]) -> None:
        """Refuse unknown keys, and keys without a value that need one.

        In a file for a subcommand, jsonargparse does not name the wrong key, and it accepts
        `null` as a value of any type.

        Raises:
            UsageError: naming the key.
        """
        known: dict[str, argparse.Action] = {}
        for action in self._actions:
            if isinstance(action, _HelpAll):
                continue
            if action.help != argparse.SUPPRESS and not action.dest.startswith(("help", "print_")):
                known |= {flag.removeprefix("--"): action for flag in action.option_strings}
        known |= {name.replace("-", "_"): action for name, action in known.items()}
        switches = [name for name, action in known.items() if is_switch(action)]
        keys = [name for name in known if "-" not in name and name != "config"]
        for key, value in values.items():
            if key not in known:
                raise unknown_key(source, key, keys, switches)
            action = known[key]
            kinds = get_args(getattr(action, "_typehint", None))
            if value is None and action.default is not None and type(None) not in kinds:
                raise UsageError(f"{source}: --{str(key).replace('_', '-')} needs a value")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise a UsageError with the message in one line, with suggestions for unknown names."""
        if match := re.match(r'expected "(\S+)" to be one of', message):
            self._refuse_without_command(match[1].split(".")[:-1])
        command = as_typed(self.prog)
        raise UsageError(explain(message, sorted(_long_options(self)), command)) from None

    def _refuse_without_command(self, words: Sequence[str]) -> NoReturn:
        """Print the commands that may follow these words, and raise that one is missing."""
        parser: ArgumentParser = self
        for word in words:
            parser = subcommands(parser)[word]
        print(parser.format_help(), end="")
        raise UsageError(f"a command is missing: one of {', '.join(subcommands(parser))}")


# What users type as commands of `plan`, and what it is.
MEANT = {
    "auto": "plan show --plan auto",
    "adaptive": "plan show --plan auto",
    "explain": "plan show --explain",
    "predict": "plan simulate",
}


def explain(message: str, options: Iterable[str], command: str) -> str:
    """Turn jsonargparse's message into one line.

    Args:
        options: valid option names of the command.
        command: the command whose words are wrong, as a user types it.
    """
    options = list(options)
    message = " ".join(message.split())
    if match := re.match(r"unrecognized arguments: (\S+)", message, re.IGNORECASE):
        return _unknown_option(match[1].partition("=")[0], options, command)
    if match := re.match(r"argument (\S+): expected one argument", message):
        form = ": write --sbatch NAME=VALUE, without dashes" if match[1] == "--sbatch" else ""
        return f"{match[1].replace('/', ' or ')} needs a value{form}"
    if match := re.match(r"argument (\S+): ignored explicit argument (.*)", message):
        return f"{match[1]} takes no value: leave {match[2]} out"
    if match := re.match(r"(?:Subcommand|Option|Key).*?does not accept option '(.+?)'", message):
        names = [option.removeprefix("--") for option in options]
        keys = [name.replace("-", "_") for name in names if not name.startswith("no-")]
        return f"unknown key {match[1]}" + nearest(match[1], keys)
    if match := re.match(r"argument (\S+): invalid choice: '(.*?)' \(choose (.*)\)", message):
        option, value, choices = match[1], match[2], re.findall(r"'(.*?)'", match[3])
        wrong = (
            f"{option} {value} is not known" if option in options else f"unknown command {value}"
        )
        if meant := MEANT.get(value) if command.endswith(" plan") else None:
            return f"{wrong}: write hvdtrain {meant}"
        return wrong + nearest(value, choices)
    if match := re.match(r"the following arguments are required: (.*)", message):
        keys = [name.split(".")[-1] for name in match[1].split(", ")]
        needed = [f"--{key}" if f"--{key}" in options else key for key in keys]
        return f"missing: {', '.join(needed)}"
    if match := re.match(r'Parser key "\S*config": File does not exist: (.*)', message):
        return f"--config {match[1]} does not exist: correct the path"
    if match := re.match(r'Parser key "(.*?)": Expected an? (.*)\. Got value: (.*)', message):
        return _wrong_value(_as_typed(match[1], options), match[2], match[3])
    if match := re.match(
        r'Parser key "(.*?)": .*Subtypes: \[(.*?)\] Err.*Given value: (.*)', message
    ):
        return _wrong_value(_as_typed(match[1], options), match[2], match[3])
    return re.sub(r'^Parser key "(?:\S+\.)?(.*?)": ', r"--\1: ", message)


def add_config(parser: ArgumentParser) -> None:
    """Add --config, and describe jsonargparse's --print_config in one line."""
    parser.add_argument(
        "--config",
        action="config",
        metavar="FILE",
        help="YAML file with keys of these options; the command line wins",
    )
    printing = parser._option_string_actions["--print_config"]
    printing.help, printing.metavar = "print these options as YAML and exit", ""


def add_dataclass(parser: ArgumentParser, owner: type, heading: str = "") -> None:
    """Add one option for each field of a dataclass, described by its metadata (`sections.about`).

    Args:
        heading: heading for the fields that name none; without one they are listed among the
            parser's own options.
    """
    hints = get_type_hints(owner)
    groups: dict[str, Any] = {"": parser}
    headings = ["", *Group]  # in the order of the help

    def place(item: dataclasses.Field[Any]) -> int:
        return headings.index(item.metadata.get("group") or "")

    if any(Rule.FIRST in item.metadata.get("rule", NO_RULE) for item in dataclasses.fields(owner)):
        parser.add_argument("--help-all", action=_HelpAll, help="list all options and exit")
    for item in sorted(dataclasses.fields(owner), key=place):
        title = item.metadata.get("group") or heading
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_option(groups[title], item, hints[item.name])


def _add_option(group: Any, item: dataclasses.Field[Any], kind: Any) -> None:
    """Add one option with the type, default and help of a field."""
    about, flag = item.metadata, "--" + item.name.replace("_", "-")
    text = about["help"]
    if about.get("default"):
        text += f" (default: {about['default']})"
    kinds = get_args(kind) or (kind,)
    shown = about.get("metavar") or metavar(kind) or item.name.upper()
    flags = [flag, f"--{about['alias']}"] if about.get("alias") else [flag]
    settings: dict[str, Any] = {"type": kind, "help": text, "metavar": shown}
    if bool in kinds:
        added = _add_switch(group, flag, kind, item.default, text)
    elif list[str] in kinds or kind == list[str]:
        settings |= {"type": _Texts(), "metavar": about.get("metavar") or "VALUE"}
        default: list[str] | None = [] if kind == list[str] else None
        added = group.add_argument(flag, action="extend", default=default, **settings)
    elif item.default is dataclasses.MISSING:
        added = group.add_argument(*flags, required=True, **settings)
    else:
        added = group.add_argument(*flags, default=item.default, **settings)
    added.is_hidden = "rule" in about and Rule.FIRST not in about["rule"]


def _add_switch(group: Any, flag: str, kind: Any, default: object, text: str) -> Any:
    """Add `--name`, `--name VALUE` and `--no-name`; the last one on the command line wins.

    jsonargparse's ActionYesNo is not used: it accepts no value but true and false, and it reads
    `--no-name false` as true.
    """
    others = [
        value for member in get_args(kind) if member is not bool for value in get_args(member)
    ]
    added = group.add_argument(
        flag,
        type=kind,
        nargs="?",
        const=True,
        default=default,
        help=text,
        metavar="|".join(others),
    )
    group.add_argument(
        f"--no-{flag.removeprefix('--')}",
        dest=flag.removeprefix("--").replace("-", "_"),
        action=SwitchOff,
        default=default,
        help=argparse.SUPPRESS,
    )
    return added


def select_fields(kind: type[Options], values: Mapping[str, Any]) -> Options:
    """Return a dataclass filled with those of the parsed values that are its fields."""
    names = [item.name for item in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: values[name] for name in names})


class _HelpAll(argparse.Action):
    """Prints the whole help page, and ends the process."""

    def __init__(self, **settings: Any) -> None:
        settings |= {"nargs": 0, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        super().__init__(**settings)

    def __call__(self, parser: Any, *ignored: Any) -> None:
        """Print the page and exit."""
        print(parser.format_help(), end="")
        parser.exit()


class _Texts:
    """The type of an option that may be repeated: one value, or a list from a file."""

    def __call__(self, value: Any) -> list[str]:
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"must be text, not {value}")
        return texts

    def __repr__(self) -> str:
        return "str"  # in the help


def _files_first(words: Sequence[str]) -> list[str]:
    """Put every `--config FILE` before the other options."""
    files: list[str] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--config":
            files += [word, *itertools.islice(rest, 1)]
        else:
            (files if word.startswith("--config=") else others).append(word)
    return files + others


def _long_options(parser: ArgumentParser) -> set[str]:
    """Return the options of a parser and of its commands, for which it may report errors."""
    names: set[str] = set()
    for action in parser._actions:
        names.update(flag for flag in action.option_strings if flag.startswith("--"))
    for command in subcommands(parser).values():
        names |= _long_options(command)
    return names - {"--help", "--version", "--print_shtab", "--print_config"}


def _unknown_option(name: str, options: Iterable[str], command: str) -> str:
    if not name.startswith("-"):
        return f"{command} does not expect {name}: options start with --"
    longer = [option for option in options if option.startswith(name)][:3]
    if not longer and OPTION_ALIASES.get(name, "").partition(" ")[0] in options:
        return f"unknown option {name}: use {OPTION_ALIASES[name]}"
    word = name.removeprefix("--").replace("-", "_")
    advice = instead(word) or (instead(word.removeprefix("no_")) and "leave it out")
    if advice and "--model" in options:
        return f"{name} is not an option of this version: {advice}"
    if "--sbatch" in options and name.removeprefix("--") in SBATCH_ONLY:
        text = name.removeprefix("--")
        return f"unknown option {name}: write --sbatch {text}, or --sbatch {text}=VALUE"
    suggestion = f"; did you mean {' or '.join(longer)}?" if longer else nearest(name, options)
    if not suggestion or suggestion.count(",") > MOST_NAMES:
        page = "--help-all" if "--help-all" in options else "--help"
        suggestion = f": {command} {page} lists the options"
        if "--sbatch" in options:
            suggestion += ", and --sbatch NAME=VALUE passes another one to sbatch"
    return f"unknown option {name}{suggestion}"


def _as_typed(key: str, options: Iterable[str]) -> str:
    """Return the prefix of a value on the command line: an option and a space, or nothing."""
    flag = f"--{key.split('.')[-1].replace('_', '-')}"
    return f"{flag} " if flag in options else ""


def _wrong_value(typed: str, expected: str, value: Any) -> str:
    match = re.search(r"Literal\[(.*?)\]", expected)
    literals = re.findall(r"'(.*?)'", match[1]) if match else []
    if "bool" in expected:
        *others, last = ["true", "false", *literals]
        return f"{typed}must be {', '.join(others)} or {last}, not {value}"
    if VALUE_ALIASES.get(value) in literals:
        return f"{typed}{value} is not supported: use {VALUE_ALIASES[value]}"
    if literals:
        return f"{typed}{value} is not known" + nearest(str(value), literals)
    if form := VALUE_FORMS.get(typed.strip()):
        return f"{typed}{value} is not understood: give {form}"
    kind = "a whole number" if "int" in expected else "a number" if "float" in expected else "text"
    if "int" in expected and "str" in expected:
        kind = "text or a whole number"
    return f"{typed}must be {kind}, not {value}"
