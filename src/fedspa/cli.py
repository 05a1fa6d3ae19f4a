"""The command line: Hydra composes the config, `check` checks it, an entry point's task runs it."""

from __future__ import annotations

import errno
import logging
import os
import re
import shlex
import sys
import textwrap
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from fedspa.config.composing import parsed, several_values
from fedspa.config.plan import Plan, check
from fedspa.config.recorded import KEYS, repeating
from fedspa.config.schema import register
from fedspa.core.errors import UserError, brief, nearest
from fedspa.core.explaining import explain, no_item
from fedspa.core.launch import launched
from fedspa.core.lazy_torch import defer_torch
from fedspa.core.paths import config_dir
from fedspa.core.settings import Config
from fedspa.runs.folders import is_chosen
from fedspa.runs.interruption import PREEMPTED, READER_GONE, STOPPED, Preempted, command
from fedspa.studies.jobs import register_studies
from fedspa.studies.launchers import EXTRAS, JobFailed, in_own_process, side_by_side, take_a_gpu

UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of the operating system that speak of a place, not of a bug."""

COMPOSING = (HydraException, OmegaConfBaseException, YAMLError, ValueError, OverflowError)
"""Errors that mistakes in settings raise while Hydra composes a config."""

Task = Callable[[Plan, Path], None]
"""An entry point's work, with a checked run and the folder for its files."""


@command
def main(task: Task, usage: str | None = None, schema: type[Config] = Config) -> int:
    """Run the command line: `task` once, or with -m once for each job of a sweep.

    Args:
        usage: the text of `--help` for this command, above the groups of the config.
        schema: the settings of this command: those of a run, and further ones.

    Returns the exit code: 0, done; 1, a bug of fedspa, with its traceback; 2, a mistake of the user, in one sentence
    (with HYDRA_FULL_ERROR=1 also its traceback); 75, ended by SIGTERM or SIGUSR1; 130, ended by Ctrl-C; 141, standard
    output was closed. Several jobs return their highest code. All ranks return the code, and the first prints.
    """
    show_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # without it Hydra reports errors itself, and exits
    logging.raiseExceptions = False  # a log that cannot be written must not bury the sentence on the reason
    defer_torch()
    words = sys.argv[1:]
    sweeping = bool({"-m", "--multirun"} & set(words))
    try:
        options = _options(words)
        register(schema)
        sys.argv = [sys.argv[0], *words, *repeating(options)]
        register_studies()
        shown = (usage or "").strip().replace("$", "$$")  # Hydra reads it as a template
        OmegaConf.register_new_resolver("usage", lambda: shown, replace=True)
        OmegaConf.register_new_resolver("choices", _choices, replace=True)
        if sweeping and (ranks := launched().size) > 1:
            raise UserError(
                f"-m starts runs one after another, but here are {ranks} ranks for one run: leave out one."
            )
        job = _job(task, show_traceback)
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")(job)()
    except BrokenPipeError:
        raise
    except KeyboardInterrupt as stop:
        preempted = isinstance(stop, Preempted)
        if launched().main:
            again = "the same command" if sweeping else "the same command with resume=auto"
            print(f"{'Preempted' if preempted else 'Stopped'}: {again} goes on.", file=sys.stderr)
        return PREEMPTED if preempted else STOPPED
    except SystemExit as end:
        return int(end.code or 0)
    except UserError as error:
        return report(error, show_traceback)
    except COMPOSING as error:  # no job raises them
        return report(explain_hydra(error), show_traceback)
    except OSError as error:  # from making the folder of a run
        return report(unwritable(error), show_traceback)
    return 0


def _choices(group: str) -> str:
    """The options of a group of the config, as `--help` lists them."""
    options = GlobalHydra.instance().config_loader().get_group_options(group)
    return textwrap.fill(", ".join(options), width=100, subsequent_indent="  ")


def _job(task: Task, show_traceback: bool) -> Callable[[DictConfig], None]:
    """One run, which reports its own failure at once. That ends the program, or only this job of a sweep."""

    def job(config: DictConfig) -> None:
        chosen = HydraConfig.get()
        folder, alone = Path(chosen.runtime.output_dir), chosen.mode == RunMode.RUN
        if not launched().main:  # a run has one folder, that of the first rank; this one may be another
            with suppress(OSError):
                folder.rmdir()
        try:
            study = chosen.runtime.choices.get("sweep")
            if study and alone and not _one_of(chosen):
                raise UserError(f"sweep={study} stands for many runs: add -m to start them.")
            plan = check(config)
            beside = not alone and side_by_side(chosen.launcher)
            if beside:
                take_a_gpu()
            with in_own_process(folder) if beside else nullcontext():
                task(plan, folder)
        except JobFailed:
            raise
        except (BrokenPipeError, SystemExit):  # Rich exits where nobody reads its output any more
            raise SystemExit(READER_GONE) from None
        except Exception as error:
            if alone:
                raise SystemExit(report(error, show_traceback)) from error
            print(f"Failed: {folder.parent.name}/{folder.name}", file=sys.stderr)
            code = report(error, show_traceback)
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            raise JobFailed(code, f"{kind}{error}".splitlines()[0]) from None
        finally:
            with suppress(OSError):  # Hydra made the folder; it stays if anything was written to it
                folder.rmdir()
                if not is_chosen(chosen):
                    folder.parent.rmdir()  # the day's

    return job


def _options(words: Sequence[str]) -> Namespace:
    """The command line as Hydra reads it. Raises `UserError` for a word that is neither a setting nor an option."""
    for word in words:
        if word.encode(errors="replace").decode() != word:
            raise UserError(
                f"{word} is not text in UTF-8: type it in a terminal whose encoding is UTF-8, or rename the file."
            )
    options, rest = get_args_parser().parse_known_args(words)
    for word in rest:
        if word.startswith("-"):
            raise UserError(f"{word} is not an option: a setting is written as key=value, without dashes.")
        raise UserError(
            f"{word} stands apart from the other settings: write options such as -m before them all."
        )
    parsed(options.overrides)
    return options


def _one_of(chosen: Any) -> bool:
    """True if the command line gives each axis of the chosen study a value, so that it stands for one run."""
    task = OmegaConf.to_container(chosen.overrides.task)  # as it was written: ${...} is not resolved
    given = {str(override).partition("=")[0].lstrip("+") for override in task or ()}
    return not chosen.sweeper.get("rows") and given >= set(chosen.sweeper.params)


def log_into(folder: Path) -> None:
    """Let Hydra's log file be in this folder. It is made when there is something to log."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler) and handler.stream is None:  # not begun yet
            handler.baseFilename = str(folder.resolve() / Path(handler.baseFilename).name)


def report(error: Exception, show_traceback: bool) -> int:
    """Print an error: a user's mistake as one sentence, a bug with its traceback. Returns the exit code."""
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        error = unwritable(error)
    mistake = isinstance(error, UserError)
    if not launched().main:
        return 2 if mistake else 1
    if mistake and not show_traceback:
        print(f"Error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    return 2 if mistake else 1


def unwritable(error: OSError) -> UserError:
    """A place where nothing can be written, as one sentence."""
    mistake = UserError(
        f"{error.filename or 'A file of the run'} cannot be written ({error.strerror}): results need a folder "
        "with room that you may write to, such as hydra.run.dir=<folder>."
    )
    mistake.__cause__ = error
    return mistake


def explain_hydra(error: Exception) -> UserError:
    """One sentence for Hydra's error about a setting, with the nearest valid names."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    text = " ".join(str(error).split())
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        options = error.options or [file.stem for file in (config_dir() / group).glob("*.yaml")]
        mistake = UserError(f"{group or '--config-name'}={option} is not known: {nearest(option, options)}.")
        if group == "hydra/launcher" and (extra := EXTRAS.get(option)):
            mistake = UserError(f"{group} needs more than is installed: pip install 'fedspa[{extra}]'.")
    elif isinstance(error, YAMLError):
        mistake = _unreadable(error)
    elif isinstance(error, OverrideParseException):
        mistake = UserError(f"{error.override} cannot be read: {_form(error.override)}.")
    elif cause is not None:
        mistake = explain(cause)
    elif (kept := re.search(r"Could not override '(\w+)'", text)) and kept[1] in KEYS:
        mistake = UserError(
            f"{kept[1]} of the run that is repeated would be replaced by what another group brings: choose it too, as "
            f"in {kept[1]}=<a file of conf/{kept[1]}>."
        )
    elif found := re.match(r"In '(\w+)/(\S+)': (?:Could not override '\w+@|.* Key '\1' not in)", text):
        package = {"metric": f"metrics.{found[2]}", "logger": "loggers"}.get(found[1], "_global_")
        mistake = UserError(f"conf/{found[1]}/{found[2]}.yaml lacks the first line '# @package {package}'.")
    elif text.startswith("invalid literal for int()"):  # OmegaConf's error does not name the setting
        mistake = no_item(text.split("'")[1])
    elif isinstance(error, OverflowError) and (found := re.search(r"full_key: (\S+)", text)):
        mistake = UserError(f"{found[1]} is out of range: a number is at most {sys.float_info.max:.2g}.")
    elif text.startswith(("Ambiguous value", "Sweep parameters")):
        mistake = several_values(text.split("'")[1], "add -m to run each")
    else:
        mistake = UserError(f"{text.partition(' full_key:')[0].rstrip('.')}.")
    mistake.__cause__ = error
    return mistake


def _unreadable(error: YAMLError) -> UserError:
    """The sentence about a file that is no YAML."""
    if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark):
        return UserError(f"{mark.name} cannot be read as YAML, line {mark.line + 1}: {error.problem}.")
    return UserError(f"{getattr(error, 'name', 'A file')} cannot be read as YAML: {brief(error)}.")


def _form(override: str) -> str:
    """The text to type in a shell for a setting that Hydra's grammar refuses."""
    key, _, value = override.partition("=")
    text = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    quoted = shlex.quote(f"{key}={QuotedString(text, Quote.double).with_quotes()}")
    try:
        OverridesParser.create().parse_override(shlex.split(quoted)[0])
    except HydraException:  # it is the key that cannot be read
        return "a setting is written as key=value"
    if not value:
        return "a setting is written as key=value"
    return f"write {quoted}" + (", or a list as [a,b]" if value[0] in "[{(" else "")
