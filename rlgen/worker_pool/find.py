"""Imports the function that the `use` of a reward or a tool names, and collects facts for the trainer. Runs in a worker."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from rlgen.worker_pool.failures import described, user_line
from rlgen.worker_pool.source import FunctionFacts, Trade

FILE_MODULE = "rlgen_reward_"  # and a hash: module name under which a user's file is imported


def function_facts(use: str, function: Callable[..., Any], sha256: str | None, trade: Trade) -> FunctionFacts:
    """Returns signature and origin of a function. Raises `trade.error` if it cannot be called by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
        file = inspect.getsourcefile(inspect.unwrap(function))
    except (TypeError, ValueError) as error:
        raise trade.error(f"{trade.plural}: {use} is not a function that can be called by name: {error}") from error
    return FunctionFacts(
        parameters=tuple((p.name, p.kind.name, p.default is p.empty) for p in parameters),
        is_async=inspect.iscoroutinefunction(function),
        file=file,
        sha256=sha256,
    )


def find_function(use: str, trade: Trade) -> tuple[Callable[..., Any], str | None]:
    """Returns the function that `use` names, and the hash of its code; None instead of the hash if the file is unknown. Raises
    `trade.error` if there is no such module or function.
    """
    source, _, name = use.rpartition(":")
    is_file = source.endswith(".py")
    if is_file and not Path(source).is_file():
        raise trade.error(f"{trade.plural}: {source} does not exist; a path in a recipe starts at the recipe's folder")
    try:
        module = load_file(Path(source)) if is_file else importlib.import_module(source)
    except BaseException as error:  # user code may raise anything
        why = f"{described(error)} {user_line(error, source)}"
        if is_file and isinstance(error, ModuleNotFoundError) and error.name:
            folder = Path(source).resolve().parent
            if (folder / f"{error.name}.py").is_file() or (folder / error.name).is_dir():
                why += f"; to import modules beside this file, set PYTHONPATH={folder}"
        raise trade.error(f"{trade.plural}: {source} cannot be imported: {why}") from error
    written = source if is_file else inspect.getsourcefile(module) if module.__file__ else None
    function = vars(module).get(name)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        close = get_close_matches(name, functions, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(functions) or 'none'}"
        raise trade.error(f"{trade.plural}: {source} has no function `{name}`; {hint}")
    return function, None if written is None else code_hash(Path(written))


def code_hash(file: Path) -> str:
    """Returns the SHA-256 of a function's file. If modules of its folder have been imported by now, it covers their hashes too.

    Installed packages are left out. Modules that a function imports only when it is called are not covered.
    """
    import sysconfig

    folder = file.resolve().parent
    installed = [Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")]
    imported = {
        Path(path).resolve()
        for name, module in list(sys.modules.items())
        if not f"{name}.".startswith(("rlgen.", FILE_MODULE))
        and isinstance(module, ModuleType)
        and isinstance(path := vars(module).get("__file__"), str)
    }
    beside = {path for path in imported if path.is_relative_to(folder) and not any(map(path.is_relative_to, installed))}
    hashes = [file_hash(path) for path in (file, *sorted(beside - {file.resolve()})) if path.is_file()]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_file(path: Path) -> ModuleType:
    """Imports a file as a module, once per process."""
    name = FILE_MODULE + file_hash(path)[:16]
    if name in sys.modules:  # another function of the same file has imported it
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a file whose name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as for any module: dataclasses and pickles look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
