"""How many small mistakes in masks, aggregation and costs do the tests notice?

    python tests/mutants.py 150                 # about half an hour on one core; CI does not run it
    python tests/mutants.py 40 --seed 1 --minutes 10

Draws mutants from a seed: one comparison, arithmetic or boolean operator, constant or statement of the modules
below is changed in a copy of the repository, and the quick tests of that module run on it. A mutant is killed
where they fail, or take more than `LIMIT` seconds. Prints every mutant, and the share that was killed.

Each mutant is a fork of one process that has imported all but fedspa itself, so that it costs its tests alone.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUICK = ["test_rounds_by_hand.py", "test_method_identities.py"]
TESTS = {
    "masks/base.py": ["test_masks.py", *QUICK],
    "masks/dst.py": ["test_masks.py", *QUICK, "test_config.py"],
    "masks/initial.py": ["test_masks.py", *QUICK],
    "core/packed_mask.py": ["test_masks.py", "test_wire.py", *QUICK],
    "masks/rsm.py": ["test_masks.py", *QUICK],
    "masks/select.py": ["test_masks.py", *QUICK],
    "federated/aggregation.py": QUICK,
    "costs/network.py": ["test_costs.py", "test_cost_report.py", *QUICK],
    "layer_sparsity/base.py": ["test_layer_sparsity.py"],
    "layer_sparsity/er.py": ["test_layer_sparsity.py"],
    "layer_sparsity/erk.py": ["test_layer_sparsity.py"],
    "layer_sparsity/uniform.py": ["test_layer_sparsity.py"],
}
"""The modules that are mutated, and the tests that are to notice."""

LIMIT = 300
"""Seconds of tests after which a mutant counts as killed: it does not come to an end."""

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.And: ast.Or, ast.Or: ast.And, ast.USub: ast.UAdd, ast.Invert: ast.UAdd, ast.Not: ast.UAdd,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    module: str
    line: int
    change: str
    source: str


def mutants_of(module: str) -> Iterator[Mutant]:
    """Every mutant of a module. What never runs or only talks stays as it is: annotations, imports, decorators,
    docstrings, sentences of errors."""
    tree = ast.parse((ROOT / "src/fedspa" / module).read_text())
    for place, (owner, field, index) in enumerate(_places(tree)):
        value = getattr(owner, field) if index is None else getattr(owner, field)[index]
        for changed in _changes(value):
            mutated = copy.deepcopy(tree)
            twin, field, index = list(_places(mutated))[place]
            if index is None:
                setattr(twin, field, changed)
            else:
                getattr(twin, field)[index] = changed
            source = ast.unparse(ast.fix_missing_locations(mutated))
            line = getattr(value, "lineno", getattr(owner, "lineno", 0))
            yield Mutant(module, line, f"{_show(value)} -> {_show(changed)}", source)


def _places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Where a node hangs: its owner, the owner's field, and the place in it where that is a list."""
    for field, value in ast.iter_fields(tree):
        if field in ("decorator_list", "annotation", "returns", "type_params"):
            continue
        for index, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(item, ast.AST) or isinstance(item, ast.Import | ast.ImportFrom | ast.Raise):
                continue
            if (
                isinstance(item, ast.If)
                and isinstance(item.test, ast.Name)
                and item.test.id == "TYPE_CHECKING"
            ):
                continue
            yield tree, field, index
            yield from _places(item)


def _changes(node: ast.AST) -> list[ast.AST]:
    """What a node may become."""
    if type(node) in SWAPS:
        return [SWAPS[type(node)]()]
    match node:
        case ast.Constant(value=bool(value)):
            return [ast.Constant(not value)]
        case ast.Constant(value=int(value) | float(value)):
            return [ast.Constant(value + 1)]
        case ast.Expr(value=ast.Constant()):  # a docstring
            return []
        case ast.Expr() | ast.AugAssign():
            return [ast.Pass()]
        case ast.If():
            return [ast.If(ast.Constant(False), node.body, node.orelse)]
    return []


def _show(node: ast.AST) -> str:
    text = ast.unparse(node) or type(node).__name__
    return text.splitlines()[0]


def killed(mutant: Mutant, copy_of_root: Path) -> bool:
    """Whether the tests notice."""
    path = copy_of_root / "src/fedspa" / mutant.module
    before = path.read_text()
    path.write_text(mutant.source)
    try:
        return not passes(mutant.module, copy_of_root)
    finally:
        path.write_text(before)


def passes(module: str, root: Path) -> bool:
    """Whether the tests of a module pass, in a fork of this process."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(root)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1), os.dup2(silent, 2)
        import pytest

        files = [f"tests/{name}" for name in TESTS[module]]
        flags = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-k", "not command"]
        os._exit(int(pytest.main([*flags, *files])))
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def main() -> int:
    """Returns 1 where fewer than 85 % of the mutants are killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no mutant after that time")
    options = parser.parse_args()

    everything = [mutant for module in TESTS for mutant in mutants_of(module)]
    drawn = random.Random(options.seed).sample(everything, min(options.count, len(everything)))
    print(
        f"{len(drawn)} of {len(everything)} mutants of {len(TESTS)} modules, seed {options.seed}", flush=True
    )
    for name in ("torch", "lightning", "hydra", "hypothesis", "torchmetrics"):
        import_module(name)
    sys.dont_write_bytecode = True
    begin, dead, survivors = time.monotonic(), 0, []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for part in ("src", "tests", "conf", "sweeps", "docs"):
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", root)
        sys.path[:] = [
            path for path in sys.path if Path(path or ".").resolve() not in (ROOT / "src", ROOT / "tests")
        ]
        for module in {tuple(tests): module for module, tests in TESTS.items()}.values():
            if not passes(module, root):
                print(f"The tests of {module} fail, or take more than {LIMIT} s, without any mutant.")
                return 2
        for mutant in drawn:
            if time.monotonic() - begin > 60 * options.minutes:
                break
            if noticed := killed(mutant, root):
                dead += 1
            else:
                survivors.append(mutant)
            word = "killed  " if noticed else "SURVIVED"
            print(f"{word} {mutant.module}:{mutant.line}: {mutant.change}", flush=True)
    tried = dead + len(survivors)
    print(f"{dead} of {tried} killed: {100 * dead / max(tried, 1):.1f} %")
    return int(dead < 0.85 * tried)


if __name__ == "__main__":
    raise SystemExit(main())
