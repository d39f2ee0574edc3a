"""Names in the source of an installed vLLM, found by reading: nothing is imported, no GPU and no torch is needed."""

from __future__ import annotations

import ast
import os
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple, Union

Definition = Union[ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef]

MODELS = "vllm.model_executor.models"

SOURCE_LIMIT = 1 << 23
"""8 MiB of one source file; vLLM's largest are below 1 MiB."""

IMPORT_DEPTH = 8
"""Re-exports that are followed from one module to the next."""


class Found(NamedTuple):
    """A definition and the module that holds it."""

    module: str
    node: Definition

    @property
    def name(self) -> str:
        return self.node.name


class VllmSource:
    """Source files below `site`, the folder that holds `vllm/`; each is parsed once, when it is first asked for."""

    def __init__(self, site: str) -> None:
        self._site = site
        self._trees: Dict[str, Optional[ast.Module]] = {}

    def tree(self, module: str) -> Optional[ast.Module]:
        """Return the parsed module, None if there is none. Raises SyntaxError for a newer Python's syntax."""
        if module not in self._trees:
            path = os.path.join(self._site, *module.split("."))
            self._trees[module] = _parse(path + ".py") or _parse(os.path.join(path, "__init__.py"))
        return self._trees[module]

    def find(self, module: str, name: str, depth: int = 0) -> Optional[Found]:
        """Return the class or function that `name` means in `module`, also through imports and plain assignments."""
        tree = self.tree(module)
        if tree is None or depth > IMPORT_DEPTH:
            return None
        for node in _top(tree):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                return Found(module, node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name == "*" or (alias.asname or alias.name) == name:
                        wanted = name if alias.name == "*" else alias.name
                        found = self.find(self._absolute(module, node), wanted, depth + 1)
                        if found is not None:
                            return found
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and _assigns(node, name):
                return self.find(module, node.value.id, depth + 1)
        return None

    def assigned(self, module: str, name: str, depth: int = 0) -> Optional[Tuple[str, ast.expr]]:
        """Return the module and the value that a plain assignment gives to `name`, also through imports."""
        tree = self.tree(module)
        if tree is None or depth > IMPORT_DEPTH:
            return None
        for node in _top(tree):
            if isinstance(node, ast.Assign) and _assigns(node, name):
                return module, node.value
            if isinstance(node, ast.AnnAssign) and node.value and getattr(node.target, "id", "") == name:
                return module, node.value
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.assigned(self._absolute(module, node), alias.name, depth + 1)
        return None

    def imported(self, module: str, name: str) -> Optional[str]:
        """Return the module that `name` is imported from in `module`, of any package; None if it is not."""
        for node in _top(self.tree(module) or ast.Module(body=[], type_ignores=[])):
            if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
                return self._absolute(module, node)
        return None

    def lineage(self, found: Found) -> List[Found]:
        """Return a class and its bases that have a source here, the class first, each once, depth first."""
        order: List[Found] = []
        seen: Set[Tuple[str, str]] = set()

        def visit(current: Found) -> None:
            key = (current.module, current.name)
            if key in seen or not isinstance(current.node, ast.ClassDef):
                return
            seen.add(key)
            order.append(current)
            for base in current.node.bases:
                target = base.value if isinstance(base, ast.Subscript) else base
                inherited = self.find(current.module, target.id) if isinstance(target, ast.Name) else None
                if inherited is not None:
                    visit(inherited)

        visit(found)
        return order

    def method(self, found: Found, name: str) -> Optional[Found]:
        """Return the method of a class or its bases that does something; a protocol's empty body does not count."""
        for current in self.lineage(found):
            for node in current.node.body:
                if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.name != name:
                    continue
                if not _is_stub(node):
                    return Found(current.module, node)
        return None

    def attributes(self, found: Found) -> Set[str]:
        """Return what instances of a class have: methods, class variables, and what any method sets on `self`."""
        names: Set[str] = set()
        for current in self.lineage(found):
            for node in current.node.body:
                names.update(_bound(node))
            for child in ast.walk(current.node):
                if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store) and _is_self(child.value):
                    names.add(child.attr)
        return names

    def registry(self) -> Dict[str, Tuple[str, str]]:
        """Return architecture -> (module, class) of the models that vLLM knows."""
        tree = self.tree(MODELS + ".registry")
        known: Dict[str, Tuple[str, str]] = {}
        for node in ast.walk(tree) if tree is not None else ():
            if not isinstance(node, ast.Dict):
                continue
            for key, value in zip(node.keys, node.values):  # noqa: B905 - 3.9 has no strict
                names = [text(item) for item in value.elts] if isinstance(value, ast.Tuple) else []
                if key is None or len(names) != 2 or None in names:
                    continue
                module, name = str(names[0]), str(names[1])
                full = module if module.startswith("vllm.") else "%s.%s" % (MODELS, module)
                known.setdefault(str(text(key)), (full, name))
        return known

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = os.path.isdir(os.path.join(self._site, *module.split(".")))
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join(parts + ([node.module] if node.module else []))


def text(node: Optional[ast.AST]) -> Optional[str]:
    """Return the value of a string literal, None for anything else."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def parameters(function: Definition) -> List[str]:
    """Return the parameters after `self`, with a trailing `?` where there is a default: `["positions", "x?"]`."""
    if isinstance(function, ast.ClassDef):
        return []
    given = function.args
    positional = [*getattr(given, "posonlyargs", []), *given.args]
    optional = len(positional) - len(given.defaults)
    names = [argument.arg + ("?" if number >= optional else "") for number, argument in enumerate(positional)]
    by_name = zip(given.kwonlyargs, given.kw_defaults)  # noqa: B905 - 3.9 has no strict
    names += [argument.arg + ("?" if default else "") for argument, default in by_name]
    if given.vararg:
        names.append("*" + given.vararg.arg)
    if given.kwarg:
        names.append("**" + given.kwarg.arg)
    return names[1:]


def called(node: ast.AST) -> Iterator[Tuple[str, ast.Call]]:
    """Yield (name, call) of every call below `node`: `f(...)` and `a.b.f(...)` are both "f"."""
    for child in ast.walk(node):
        if isinstance(child, ast.Call):
            function: Any = child.func
            yield getattr(function, "id", getattr(function, "attr", "")), child


def keyword(call: ast.Call, name: str) -> Optional[ast.expr]:
    """Return the value of a keyword argument."""
    return next((each.value for each in call.keywords if each.arg == name), None)


def _parse(path: str) -> Optional[ast.Module]:
    try:
        with open(path, "rb") as file:
            return ast.parse(file.read(SOURCE_LIMIT), path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _top(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a module, and those under its `if` and `try`; the last definition of a name first."""
    for node in reversed(tree.body):
        yield node
        for field in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try)):
                yield from getattr(node, field, [])


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node.name
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_stub(function: Union[ast.FunctionDef, ast.AsyncFunctionDef]) -> bool:
    """Whether a body is only a docstring, `...`, `pass` or `raise NotImplementedError`."""
    for node in function.body:
        if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        raised = node.exc if isinstance(node, ast.Raise) else None
        raised = raised.func if isinstance(raised, ast.Call) else raised
        if not (isinstance(raised, ast.Name) and raised.id == "NotImplementedError"):
            return False
    return True
