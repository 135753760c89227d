"""Pass tag_blocks: find the transformer blocks and give every node its stage.

Blocks are recognised from structure only. Every node that tracing recorded inside a module carries that module's
call path (``nn_module_stack``; ``fwd_nn_module_stack`` for backward nodes). A *run* of blocks is a family of
sibling module calls (children of one container, or repeated calls of one module) that

* each hold at least two heavy operations (matrix products, attention, convolutions),
* follow each other: their stretches of the trace do not overlap and each depends on the one before,
* are mostly of one structure (half of them have the same operations).

Where runs nest (stages of blocks, encoder and decoder stacks) the innermost run that still holds most of its
parent's heavy operations wins. Runs that together hold less than half of the model's are no blocks at all.

Stages then follow the trace: prologue, block, [between], block, ..., epilogue. A forward node outside every
block goes to the prologue if it depends on nothing else, else to the block just left, or to a ``between`` stage if
it belongs to some other module; a node is never placed before its inputs. A backward node goes to its forward
node's stage (module stack, then ``seq_nr``, then inputs), never after a stage that it depends on.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import ClassVar

from torch import fx

from passes.node_facts import is_backward_tagged, is_heavy, reach
from protrain_compile.program import Program, Stage, is_symbol

MIN_HEAVY_OPS_PER_BLOCK = 2
MIN_SHARE_OF_HEAVY_OPS = 0.5


@dataclasses.dataclass(eq=False)
class ModuleCall:
    """One call of one module: its path, the calls inside it, and its forward nodes by position in the trace."""

    path: str
    children: dict[str, ModuleCall] = dataclasses.field(default_factory=dict)
    positions: list[int] = dataclasses.field(default_factory=list)
    heavy: int = 0

    @property
    def container(self) -> str:
        """Path of the module list (or module) that this module is an item of."""
        return self.path.rpartition(".")[0]


class TagBlocks:
    """Find the blocks; give every node a stage."""

    name: ClassVar[str] = "tag_blocks"
    requires: ClassVar[frozenset[str]] = frozenset({"captured"})
    provides: ClassVar[frozenset[str]] = frozenset({"stages"})

    def run(self, program: Program) -> bool:
        """Set ``stages``, ``stage_of`` and ``backward_nodes``; the graph stays as it is."""
        program.backward_nodes = backward_nodes(program)
        forward = [node for node in program.calls() if node not in program.backward_nodes]
        root = module_tree(forward)
        runs = find_runs(root, forward)
        if sum(call.heavy for run in runs for call in run) < MIN_SHARE_OF_HEAVY_OPS * root.heavy:
            runs = []
        if not runs:
            program.notes.append("no repeated blocks found: the graph is planned as one segment")
        _ForwardStages(program, forward, runs).assign()
        _assign_backward(program)
        return False


def backward_nodes(program: Program) -> set[fx.Node]:
    """Return the nodes that run in the backward.

    That is what tracing has tagged so or what is fed by such a node or a tangent, and what was traced behind the first
    of these and no output needs: the backward of an ``autograd.Function`` computes untagged on saved values. Symbolic
    sizes are no part of it, as every segment may ask for them.
    """
    if not program.differentiable:
        return set()
    found = set(program.tangents)
    has_begun = False
    for node in program.calls():
        is_fed = any(source in found for source in node.all_input_nodes)
        has_begun = has_begun or is_fed or is_backward_tagged(node)
        if is_fed or (has_begun and not is_symbol(node)):
            found.add(node)
    needed_forward = reach(each for each in program.results[: program.num_outputs] if isinstance(each, fx.Node))
    return (found - needed_forward) - set(program.tangents)


def module_path(raw: str) -> str:
    """Return ``layers.0.mlp`` for a recorded path such as ``L['self'].layers[0].mlp``."""
    path = re.sub(r"^L\['[^']*'\]", "", raw)
    path = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", path)
    return re.sub(r"\['?([^'\]]*)'?\]", r".\1", path).strip(".")


def call_stack(node: fx.Node) -> list[tuple[str, str]]:
    """Return ``(key of the call, module path)`` of the module calls around ``node``, outermost first."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return [(key, module_path(str(value[0]))) for key, value in stack.items()]


def module_tree(forward: Sequence[fx.Node]) -> ModuleCall:
    """Return the tree of module calls that the forward nodes were recorded in."""
    root = ModuleCall("")
    for position, node in enumerate(forward):
        heavy = int(is_heavy(node))
        here = root
        here.heavy += heavy
        for key, path in call_stack(node):
            if path:
                here = here.children.setdefault(key, ModuleCall(path))
                here.positions.append(position)
                here.heavy += heavy
    return root


def find_runs(call: ModuleCall, forward: Sequence[fx.Node]) -> list[list[ModuleCall]]:
    """Return the runs of blocks inside ``call``, innermost first choice, in trace order."""
    families: dict[str, list[ModuleCall]] = collections.defaultdict(list)
    for child in call.children.values():
        families[child.container].append(child)
    found: list[list[ModuleCall]] = []
    for family in families.values():
        inner = {child: find_runs(child, forward) for child in family}
        candidates = _candidates(family, forward)
        nested = candidates and all(_holds_most(inner[child], child) for child in candidates)
        if not nested and _is_run(candidates, forward):
            found.append(candidates)
        else:
            found.extend(run for runs in inner.values() for run in runs)
    return sorted(found, key=lambda run: run[0].positions[0])


def _candidates(family: list[ModuleCall], forward: Sequence[fx.Node]) -> list[ModuleCall]:
    """Return the calls that may be blocks; among named attributes (not list items) only those of one structure."""
    heavy = [child for child in family if child.heavy >= MIN_HEAVY_OPS_PER_BLOCK]
    if not heavy or all(child.path.rpartition(".")[2].isdigit() for child in heavy):
        return heavy
    structures = [_structure(child, forward) for child in heavy]
    common, _ = collections.Counter(structures).most_common(1)[0]
    return [child for child, structure in zip(heavy, structures, strict=True) if structure == common]


def _holds_most(runs: list[list[ModuleCall]], parent: ModuleCall) -> bool:
    return sum(call.heavy for run in runs for call in run) >= MIN_SHARE_OF_HEAVY_OPS * parent.heavy


def _is_run(calls: list[ModuleCall], forward: Sequence[fx.Node]) -> bool:
    if len(calls) < 2 or any(a.positions[-1] >= b.positions[0] for a, b in _pairs(calls)):
        return False
    kinds = collections.Counter(_structure(call, forward) for call in calls)
    if max(kinds.values()) * 2 < len(calls) or max(kinds.values()) < 2:
        return False
    return _is_chain(calls, forward)


def _pairs(calls: list[ModuleCall]) -> Iterator[tuple[ModuleCall, ModuleCall]]:
    return itertools.pairwise(calls)


def _structure(call: ModuleCall, forward: Sequence[fx.Node]) -> tuple[tuple[str, int], ...]:
    counts = collections.Counter(str(forward[p].target) for p in call.positions if is_heavy(forward[p]))
    return tuple(sorted(counts.items()))


def _is_chain(calls: list[ModuleCall], forward: Sequence[fx.Node]) -> bool:
    """Whether each call uses, directly or not, something that the call before it made (experts do not)."""
    index_of = {p: i for i, call in enumerate(calls) for p in call.positions}
    latest: dict[fx.Node, int] = {}
    fed: set[int] = set()
    for position, node in enumerate(forward[: calls[-1].positions[-1] + 1]):
        sources = [latest.get(each, -1) for each in node.all_input_nodes]
        mine = index_of.get(position)
        if mine is not None:
            if mine - 1 in sources:
                fed.add(mine)
            sources.append(mine)
        latest[node] = max(sources, default=-1)
    return all(i in fed for i in range(1, len(calls)))


class _ForwardStages:
    """Walks the forward nodes in trace order and gives each its stage."""

    def __init__(self, program: Program, forward: Sequence[fx.Node], runs: list[list[ModuleCall]]) -> None:
        self.program = program
        self.forward = forward
        self.block_at = {p: call for run in runs for call in run for p in call.positions}
        self.run_end = {call: run[-1].positions[-1] for run in runs for call in run}
        self.containers = {call.container for run in runs for call in run}
        self.last_position = max(self.block_at, default=-1)
        self.stages = [Stage("prologue", "prologue")]
        self.stage_of = program.stage_of
        self.current: ModuleCall | None = None

    def assign(self) -> None:
        for position, node in enumerate(self.forward):
            floor = max((self.stage_of.get(each, 0) for each in node.all_input_nodes), default=0)
            self.stage_of[node] = max(floor, self._wanted(position, node, floor))
        self.program.stages = tuple(self.stages)

    def _wanted(self, position: int, node: fx.Node, floor: int) -> int:
        block = self.block_at.get(position)
        if block is not None:
            return 0 if is_symbol(node) else self._enter(block)
        if is_symbol(node) or (floor == 0 and position < self.last_position):
            return 0
        if position > self.last_position and self.last_position >= 0:
            if self.stages[-1].kind != "epilogue":
                self.stages.append(Stage("epilogue", "epilogue"))
            return len(self.stages) - 1
        if self._between(position, node) and self.stages[-1].kind != "between":
            count = sum(stage.kind == "between" for stage in self.stages)
            self.stages.append(Stage("between", f"between {count}"))
        return len(self.stages) - 1

    def _enter(self, block: ModuleCall) -> int:
        if block is not self.current:
            self.current = block
            index = sum(stage.kind == "block" for stage in self.stages)
            self.stages.append(Stage("block", f"block {index}", block.path))
        return max(i for i, stage in enumerate(self.stages) if stage.kind == "block")

    def _between(self, position: int, node: fx.Node) -> bool:
        """Whether a node after some block belongs to other modules, rather than to the code that loops over blocks."""
        if self.current is None:
            return False
        if position > self.run_end[self.current]:
            return True
        paths = [path for _, path in call_stack(node) if path]
        return bool(paths) and not any(f"{container}.".startswith(f"{paths[-1]}.") for container in self.containers)


def _assign_backward(program: Program) -> None:
    """Place backward nodes with their forward nodes, monotone in reverse."""
    stage_of_call: dict[str, int] = {}
    stage_of_sequence: dict[int, int] = {}
    differentiated = _fed_by_trainable_inputs(program)
    for node in program.calls():
        if node in program.backward_nodes:
            continue
        stage = program.stage_of[node]
        if program.stages[stage].kind == "block":
            path = program.stages[stage].path
            stage_of_call.update((key, stage) for key, inner in call_stack(node) if f"{inner}.".startswith(f"{path}."))
        if "seq_nr" in node.meta and node in differentiated:
            number = node.meta["seq_nr"]
            stage_of_sequence[number] = max(stage, stage_of_sequence.get(number, 0))
    last = len(program.stages) - 1
    unfed: list[fx.Node] = []
    for node in program.calls():
        if node not in program.backward_nodes:
            continue
        ceiling = min((program.stage_of[s] for s in node.all_input_nodes if s in program.backward_nodes), default=last)
        if not any(s in program.backward_nodes or s in program.tangents for s in node.all_input_nodes):
            unfed.append(node)
        wanted = _wanted_backward(node, stage_of_call, stage_of_sequence)
        program.stage_of[node] = min(ceiling, last if wanted is None else wanted)
    for node in reversed(unfed):
        users = [program.stage_of[user] for user in node.users if user in program.backward_nodes]
        program.stage_of[node] = max(users, default=0)


def _fed_by_trainable_inputs(program: Program) -> set[fx.Node]:
    """Return the nodes that depend on a trainable input; others only share the ``seq_nr`` of the last one that does."""
    found = {node for node, source in zip(program.primals, program.inputs, strict=True) if source.trainable}
    for node in program.calls():
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _wanted_backward(node: fx.Node, by_call: dict[str, int], by_sequence: dict[int, int]) -> int | None:
    if node.meta.get("is_gradient_acc"):
        return None
    calls = [by_call[key] for key, _ in call_stack(node) if key in by_call]
    if calls:
        return calls[-1]
    return by_sequence.get(node.meta.get("seq_nr", -1))
