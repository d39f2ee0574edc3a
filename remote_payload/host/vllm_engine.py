"""What the installed vLLM's source says of its engine: the arguments it takes, and the ways that a GPU leaves open.

Read with `ast`, as everything of vLLM here. Conditions over the GPU's compute capability are evaluated, all others
are taken to be open, so that what is reported is what vLLM can take, not what it will.
"""

from __future__ import annotations

import ast
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

from remote_payload.host.vllm_source import VllmSource, parameters, text

ENGINE_ARGUMENTS = ("vllm.engine.arg_utils", "EngineArgs")
LLM = ("vllm.entrypoints.llm", "LLM")
PLATFORM = "vllm.platforms.cuda"
REGISTRIES = ("vllm.v1.attention.backends.registry", "vllm.attention.backends.registry")
REDUCE = "vllm.distributed.device_communicators"

Capability = Tuple[int, int]


def engine_arguments(source: VllmSource) -> Optional[List[str]]:
    """Return the keyword arguments of `vllm.LLM` (its own, and the fields of EngineArgs); None if not to be read."""
    found, llm = source.find(*ENGINE_ARGUMENTS), source.find(*LLM)
    if found is None or llm is None:
        return None
    fields: Set[str] = set()
    for current in source.lineage(found):
        for node in current.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields.add(node.target.id)
    made = source.method(llm, "__init__")
    own = {name.rstrip("?") for name in parameters(made.node)} if made else set()
    return sorted(fields | {name for name in own if not name.startswith("*")}) if fields else None


def gpu_paths(source: VllmSource, capability: Capability) -> Dict[str, Any]:
    """Return {"attention", "mla", "symmetric_memory", "custom_needs_nvlink"} for a compute capability as (12, 0).

    `attention` and `mla` are [{"name", "able"}] in vLLM's order of preference, null for releases that keep no such
    list; `able` is null where the source does not decide it by the capability. `symmetric_memory`: whether vLLM has
    sizes for an all-reduce in symmetric memory on it. `custom_needs_nvlink`: whether its own all-reduce is for fully
    connected GPUs only, if there are more than two.
    """
    table = source.tree(REDUCE + ".all_reduce_utils")
    sizes = _keys(table, "SYMM_MEM_ALL_REDUCE_MAX_SIZES") if table else None
    custom = source.tree(REDUCE + ".custom_all_reduce")
    return {
        "attention": _preferred(source, capability, use_mla=False),
        "mla": _preferred(source, capability, use_mla=True),
        "symmetric_memory": None if sizes is None else "%d.%d" % capability in sizes,
        "custom_needs_nvlink": None if custom is None else "fully_connected" in ast.dump(custom),
    }


def _preferred(source: VllmSource, capability: Capability, use_mla: bool) -> Optional[List[Dict[str, Any]]]:
    found = source.find(PLATFORM, "_get_backend_priorities")
    if found is None or isinstance(found.node, ast.ClassDef):
        return None
    known = {"device_capability": capability, "use_mla": use_mla}
    names = list(dict.fromkeys(_returned(found.node.body, known)[0]))
    return [{"name": name, "able": _able(source, name, capability)} for name in names] or None


def _returned(body: List[ast.stmt], known: Dict[str, Any]) -> Tuple[List[str], bool]:
    """Return the backends in the `return`s that can be reached, and whether one of them must be."""
    names: List[str] = []
    for node in body:
        if isinstance(node, ast.Return):
            return names + list(_backends(node)), True
        if isinstance(node, ast.If):
            answer = evaluate(node.test, known)
            ended = []
            for branch, taken in ((node.body, answer is not False), (node.orelse, answer is not True)):
                if taken:
                    more, ends = _returned(branch, known)
                    names += more
                    ended.append(ends)
            if all(ended):
                return names, True
    return names, False


def _backends(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name) and child.attr.isupper():
            yield child.attr


def _able(source: VllmSource, name: str, capability: Capability) -> Optional[bool]:
    """Say whether a backend's class takes the GPU, by its `supports_compute_capability`."""
    place = next((path for registry in REGISTRIES for path in _place(source, registry, name)), None)
    found = source.find(*place) if place else None
    method = source.method(found, "supports_compute_capability") if found else None
    if method is None or isinstance(method.node, ast.ClassDef):
        return None
    given = [argument.arg for argument in method.node.args.args]
    returned = [node.value for node in ast.walk(method.node) if isinstance(node, ast.Return) and node.value]
    if len(returned) != 1 or len(given) != 2:
        return None
    answer = evaluate(returned[0], {given[1]: capability})
    return answer if isinstance(answer, bool) else None


def _place(source: VllmSource, registry: str, name: str) -> Iterator[Tuple[str, str]]:
    """Yield (module, class) of an enum member such as `FLASHMLA = "vllm.v1...FlashMLABackend"`."""
    tree = source.tree(registry)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            path = "".join(filter(None, [text(node.value)]))
            if path:
                module, _, cls = path.rpartition(".")
                yield module, cls


def _keys(tree: ast.Module, name: str) -> Optional[Set[str]]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Dict) and any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return {str(text(key)) for key in value.keys if key is not None}
    return None


# ------------------------------------------------------------------------------------------- conditions


def evaluate(node: ast.expr, known: Dict[str, Any]) -> Any:
    """Return the value of an expression over `known` names, None for whatever it does not decide.

    A capability is a pair; `x.major`, `x.minor`, comparisons with numbers, lists and `DeviceCapability(...)`, and
    `and`, `or`, `not` are understood.
    """
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return [evaluate(item, known) for item in node.elts]
    if isinstance(node, ast.Attribute):
        value = evaluate(node.value, known)
        place = {"major": 0, "minor": 1}.get(node.attr)
        return value[place] if isinstance(value, tuple) and place is not None else None
    if isinstance(node, ast.Call):
        values = [evaluate(item, known) for item in node.args] + [evaluate(k.value, known) for k in node.keywords]
        is_capability = getattr(node.func, "id", "") == "DeviceCapability"
        return tuple(values) if is_capability and None not in values else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = evaluate(node.operand, known)
        return None if value is None else not value
    if isinstance(node, ast.BoolOp):
        values = [evaluate(item, known) for item in node.values]
        decisive = isinstance(node.op, ast.Or)
        if any(value is not None and bool(value) is decisive for value in values):
            return decisive
        return None if None in values else not decisive
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _compare(node.ops[0], evaluate(node.left, known), evaluate(node.comparators[0], known))
    return None


def _compare(operator: ast.cmpop, left: Any, right: Any) -> Optional[bool]:
    if left is None or right is None or (isinstance(right, list) and None in right):
        return None
    tests: Dict[Any, Callable[[], Any]] = {
        ast.Eq: lambda: left == right, ast.NotEq: lambda: left != right, ast.In: lambda: left in right,
        ast.NotIn: lambda: left not in right, ast.Lt: lambda: left < right, ast.LtE: lambda: left <= right,
        ast.Gt: lambda: left > right, ast.GtE: lambda: left >= right,
    }  # fmt: skip
    test = tests.get(type(operator))
    try:
        return None if test is None else bool(test())
    except TypeError:
        return None
