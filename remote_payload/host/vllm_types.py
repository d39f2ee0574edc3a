"""What values the installed vLLM takes for its simple engine arguments, read from its source.

Only those are told whose value goes, as it is and in every case, into a field of one of vLLM's configuration classes
that pydantic checks: those refuse what is of another type. What an annotation, a default or a validator leaves open
is not told, so that nothing is refused here that vLLM would take.
"""

from __future__ import annotations

import ast
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from remote_payload.host.vllm_source import Found, VllmSource, called, keyword, text

ENGINE_ARGUMENTS = ("vllm.engine.arg_utils", "EngineArgs")
MAKER = "create_engine_config"

SIMPLE = ("int", "float", "bool", "str")
BOUNDS = ("ge", "gt", "le", "lt")

NEVER_IN_TOML = ("torch.dtype",)
"""Members of a union that no value of a playbook is: they leave nothing open."""

DEPTH = 8
"""Aliases of a type, and methods that call methods, that are followed."""

BRANCHES = (ast.If, ast.For, ast.While, ast.Try)
CONDITIONAL = (
    ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.FunctionDef,
)  # fmt: skip
"""What is below one of these may not happen."""


class Passed(NamedTuple):
    """An argument that becomes the field `field` of the class `config`, but for the values `replaced`."""

    name: str
    config: Found
    field: str
    replaced: List[Any]


class _Given(NamedTuple):
    """An expression whose value is that of the argument `name`, unless that is one of `replaced`."""

    name: str
    replaced: List[Any]


class _Open(Exception):
    """An annotation that is not plainly one of the simple types."""


def engine_types(source: VllmSource) -> Dict[str, Dict[str, Any]]:
    """Return argument -> {"types", "choices", "bounds"} of those whose type can be told.

    `types` are of "int", "float", "bool", "str"; `choices` the values of a Literal beside them,
    `bounds` such as {"ge": 1} has pydantic's names. None, which no playbook can say, is not told. Empty where
    EngineArgs cannot be read.
    """
    found = source.find(*ENGINE_ARGUMENTS)
    if found is None:
        return {}
    changed = set(_changed(source, found))
    told: Dict[str, Dict[str, Any]] = {}
    for passed in passed_on(source):
        if passed.name not in changed and passed.name not in told:
            wanted = _wanted(source, passed.config, passed.field)
            if wanted is not None:
                wanted["choices"] += [value for value in passed.replaced if value not in wanted["choices"]]
                told[passed.name] = wanted
    return told


# ------------------------------------------------------------------------------- where an argument goes


def passed_on(source: VllmSource) -> Iterator[Passed]:
    """Yield the arguments that a configuration class is given unchanged whenever an engine is made."""
    arguments = source.find(*ENGINE_ARGUMENTS)
    if arguments is None:
        return
    for method, call in _calls_of(source, arguments, MAKER, 0):
        config = source.find(arguments.module, call.func.id) if isinstance(call.func, ast.Name) else None
        if config is None or not _is_checked(source, config):
            continue
        for keyword_given in call.keywords:
            given = _given(source, Found(arguments.module, method), keyword_given.value, 0)
            if keyword_given.arg and given is not None:
                yield Passed(given.name, config, keyword_given.arg, given.replaced)


def _given(source: VllmSource, method: Found, value: ast.expr, depth: int) -> Optional[_Given]:
    """Return the argument that an expression of `method` stands for; None where that cannot be told.

    Told are the argument itself, another value in place of None (which no playbook gives), a local name that is set
    once and under no condition, and a function that hands its argument back but for one constant.
    """
    if depth > DEPTH:
        return None
    if _is_own(value):
        return _Given(getattr(value, "attr", ""), [])
    if isinstance(value, ast.IfExp):
        test = value.test
        if isinstance(test, ast.Compare) and _is_none(test.comparators[0]) and _is_own(test.left):
            kept = {ast.Is: value.orelse, ast.IsNot: value.body}.get(type(test.ops[0]))
            if kept is not None and ast.dump(kept) == ast.dump(test.left):
                return _given(source, method, kept, depth + 1)
    elif isinstance(value, ast.Name):
        only = _set_once(method.node, value.id)
        return None if only is None else _given(source, method, only, depth + 1)
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and not value.keywords:
        function = source.find(method.module, value.func.id)
        for number, argument in enumerate(value.args):
            given = _given(source, method, argument, depth + 1)
            other = _replaced_by(function, number) if given is not None and function is not None else None
            if given is not None and other is not None:
                return _Given(given.name, [*given.replaced, *other])
    return None


def _set_once(method: ast.AST, name: str) -> Optional[ast.expr]:
    """Return what a name is set to where that is done once in a method, under no condition."""
    stored = [
        each
        for each in ast.walk(method)
        if isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, (ast.Store, ast.Del))
    ]
    values = [
        each.value
        for each in getattr(method, "body", ())
        if isinstance(each, ast.Assign) and [getattr(target, "id", "") for target in each.targets] == [name]
    ]
    return values[0] if len(stored) == len(values) == 1 else None


def _replaced_by(function: Found, number: int) -> Optional[List[Any]]:
    """Return the constant that a function replaces in its parameter, where it hands all others back as they are.

    Such a function begins with `if parameter != "auto": return parameter`; what follows concerns "auto" alone.
    """
    if not isinstance(function.node, ast.FunctionDef) or number >= len(function.node.args.args):
        return None
    name = function.node.args.args[number].arg
    body = [each for each in function.node.body if not (isinstance(each, ast.Expr) and text(each.value) is not None)]
    first = body[0] if body else None
    if not (isinstance(first, ast.If) and isinstance(first.test, ast.Compare) and len(first.test.ops) == 1):
        return None
    other, returned = first.test.comparators[0], first.body[0]
    if (
        isinstance(first.test.ops[0], ast.NotEq)
        and getattr(first.test.left, "id", "") == name
        and isinstance(other, ast.Constant)
        and isinstance(returned, ast.Return)
        and getattr(returned.value, "id", "") == name
    ):
        return [other.value]
    return None


def _calls_of(source: VllmSource, arguments: Found, method: str, depth: int) -> Iterator[Tuple[Any, Any]]:
    """Yield (method, call) of what a method calls under no condition, and of the methods that it calls so."""
    made = source.method(arguments, method)
    if made is None or isinstance(made.node, ast.ClassDef) or depth > DEPTH:
        return
    for statement in made.node.body:
        if any(isinstance(child, BRANCHES) for child in ast.walk(statement)):  # itself, or what a `with` holds
            if any(isinstance(child, ast.Return) for child in ast.walk(statement)):
                return  # what follows may not be reached
            continue
        for call in _certain(statement):
            if _is_own(call.func):
                yield from _calls_of(source, arguments, call.func.attr, depth + 1)
            else:
                yield made.node, call


def _certain(node: ast.AST) -> Iterator[Any]:
    if isinstance(node, CONDITIONAL):
        return
    if isinstance(node, ast.Call):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _certain(child)


def _changed(source: VllmSource, arguments: Found) -> Iterator[str]:
    """Yield the arguments that EngineArgs sets itself, other than where none was given."""
    for current in source.lineage(arguments):
        for method in current.node.body:
            if isinstance(method, ast.FunctionDef):
                yield from _set_in(method, [])


def _set_in(node: ast.AST, unset: List[str]) -> Iterator[str]:
    """Yield what is set below `node`; `unset` are the names that are known to be None there."""
    if isinstance(node, ast.If):
        for taken in node.body:
            yield from _set_in(taken, [*unset, *_compared_with_none(node.test)])
        for other in node.orelse:
            yield from _set_in(other, unset)
        return
    if _is_own(node) and isinstance(getattr(node, "ctx", None), ast.Store):
        name = getattr(node, "attr", "")
        if not any(each in (name, "orig_" + name) for each in unset):
            yield name
    for child in ast.iter_child_nodes(node):
        yield from _set_in(child, unset)


def _compared_with_none(test: ast.expr) -> List[str]:
    tests = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    return [
        str(getattr(each.left, "attr", getattr(each.left, "id", "")))
        for each in tests
        if isinstance(each, ast.Compare) and isinstance(each.ops[0], ast.Is) and _is_none(each.comparators[0])
    ]


# ------------------------------------------------------------------------------- what a field takes


def _is_checked(source: VllmSource, config: Found) -> bool:
    """Whether pydantic makes the class: by its own `dataclass`, or by vLLM's `config` where that calls it."""
    if not isinstance(config.node, ast.ClassDef):
        return False
    if any(_defines(current.node, "__init__") for current in source.lineage(config)):
        return False
    names = [
        getattr(each, "id", getattr(getattr(each, "func", None), "id", "")) for each in config.node.decorator_list
    ]
    if "dataclass" in names:
        return source.imported(config.module, "dataclass") == "pydantic.dataclasses"
    decorator = source.find(config.module, "config") if "config" in names else None
    return (
        decorator is not None
        and source.imported(decorator.module, "dataclass") == "pydantic.dataclasses"
        and any(name == "dataclass" for name, _ in called(decorator.node))
    )


def _wanted(source: VllmSource, config: Found, field: str) -> Optional[Dict[str, Any]]:
    """Return what `engine_types` says of a field; None where it is open."""
    for current in source.lineage(config):
        if field in _unchecked(current.node):
            return None
    for current in source.lineage(config):
        for node in current.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == field:
                found: Dict[str, Any] = {"types": [], "choices": [], "bounds": _bounds(node.value)}
                try:
                    _read(source, current.module, node.annotation, found, 0)
                except _Open:
                    return None
                return found if found["types"] or found["choices"] else None
    return None


class _Every(Set[str]):
    def __contains__(self, name: object) -> bool:
        return True


def _unchecked(config: ast.AST) -> Set[str]:
    """Return the fields that a validator of the class sees before pydantic does, and may change or take."""
    fields: Set[str] = set()
    for method in getattr(config, "body", ()):
        for decorator in getattr(method, "decorator_list", ()):
            name = getattr(getattr(decorator, "func", None), "id", "")
            given_mode = keyword(decorator, "mode") if name else None
            mode = text(given_mode) if given_mode is not None else "after"
            if name == "model_validator" and mode != "after":
                return _Every()
            if name != "field_validator" or mode == "after" or (mode == "wrap" and _hands_on(method)):
                continue
            given = [text(each) for each in decorator.args]
            if None in given or "*" in given:
                return _Every()
            fields.update(str(each) for each in given)
    return fields


_HANDED = ast.dump(ast.parse("handler(value)", mode="eval").body)


def _hands_on(method: ast.FunctionDef) -> bool:
    """Whether all that a validator does is to take None, and to leave any other value to pydantic."""
    returned = [each.value for node in method.body for each in ast.walk(node) if isinstance(each, ast.Return)]
    values: List[Any] = []
    for value in returned:
        values += [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    handed = [value for value in values if isinstance(value, ast.Call)]
    rest = [value for value in values if not isinstance(value, ast.Call)]
    tests = [each for node in method.body for each in ast.walk(node) if isinstance(each, (ast.If, ast.IfExp))]
    return (
        [ast.dump(call) for call in handed] == [_HANDED]
        and not any(
            isinstance(getattr(each, "ctx", None), ast.Store) for node in method.body for each in ast.walk(node)
        )
        and all(_is_none(value) or getattr(value, "id", "") == "value" for value in rest)
        and all(_compared_with_none(each.test) == ["value"] for each in tests)
    )


def _read(source: VllmSource, module: str, node: ast.expr, found: Dict[str, Any], depth: int) -> None:
    """Add what an annotation takes to `found`. Raises _Open where it is not one of the simple types."""
    if depth > DEPTH:
        raise _Open
    if _is_none(node) or (isinstance(node, ast.Attribute) and ast.dump(node) in _NEVER):
        return
    if text(node) is not None:  # an annotation in quotes
        _read(source, module, ast.parse(str(text(node)), mode="eval").body, found, depth + 1)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        for side in (node.left, node.right):
            _read(source, module, side, found, depth + 1)
    elif isinstance(node, ast.Subscript):
        name, inside = getattr(node.value, "id", ""), node.slice
        inside = getattr(inside, "value", inside) if type(inside).__name__ == "Index" else inside  # Python 3.8
        members = list(inside.elts) if isinstance(inside, ast.Tuple) else [inside]
        if name == "Literal":
            _read_literal(source, module, members, found, depth)
        elif name == "InitVar" and depth == 0:  # pydantic checks it as it does a field
            _read(source, module, members[0], found, depth + 1)
        elif name in ("Optional", "Union"):
            for member in members:
                _read(source, module, member, found, depth + 1)
        else:
            raise _Open
    elif isinstance(node, ast.Name) and node.id in SIMPLE:
        found["types"].append(node.id)
    else:
        alias = source.assigned(module, node.id) if isinstance(node, ast.Name) else None
        if alias is None:
            raise _Open
        _read(source, alias[0], alias[1], found, depth + 1)


_NEVER = {ast.dump(ast.parse(name, mode="eval").body) for name in NEVER_IN_TOML}


def _read_literal(
    source: VllmSource, module: str, members: List[ast.expr], found: Dict[str, Any], depth: int
) -> None:
    for member in members:
        if isinstance(member, ast.Name):  # another Literal: its members are this one's
            alias = source.assigned(module, member.id)
            if alias is None or not _is_literal(alias[1]):
                raise _Open
            _read(source, alias[0], alias[1], found, depth + 1)
            continue
        if not isinstance(member, ast.Constant):
            raise _Open
        if not isinstance(member.value, (str, int, type(None))):
            raise _Open
        if member.value is not None:
            found["choices"].append(member.value)


def _is_literal(node: ast.expr) -> bool:
    return isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Literal"


def _bounds(default: Optional[ast.expr]) -> Dict[str, float]:
    """Return the plain limits of a `Field(default=..., ge=1)`."""
    if not (isinstance(default, ast.Call) and getattr(default.func, "id", "") == "Field"):
        return {}
    limits: Dict[str, float] = {}
    for each in default.keywords:
        value = each.value.value if isinstance(each.value, ast.Constant) else None
        if each.arg in BOUNDS and isinstance(value, (int, float)):
            limits[each.arg] = value
    return limits


def _defines(node: ast.AST, name: str) -> bool:
    return any(isinstance(each, ast.FunctionDef) and each.name == name for each in getattr(node, "body", ()))


def _is_own(node: Any) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_none(node: Optional[ast.AST]) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
