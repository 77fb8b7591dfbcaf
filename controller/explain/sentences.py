"""The sentences of reasons, from what is available (pure)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from controller.cluster.fleet import FleetGpu
from controller.demand.eligibility import Excluded, Exclusion
from controller.demand.feasibility import Feasibility, Nodes
from controller.demand.requirements import MAX_DEVICES, ClaimRequirements, DeviceRequest
from controller.demand.selected_devices import Selector
from controller.explain.availability import SHOWN, Availability, Obstacle, SelectedGpu, holders_of, listed, named
from controller.explain.moves import MAX_NODES, Moves
from controller.explain.reason import Reason, ReasonCode
from deviceclasses.cel.library.quantity import parse_quantity
from deviceclasses.cel.values import EvaluationError
from driver.config.suggestions import meant
from driver.model.device import Device, DeviceKind
from driver.model.gpu import MigMode
from driver.slices.attributes import attributes, capacity

OF_OBSTACLE = {
    Obstacle.CLOSED: (ReasonCode.CLOSED, "nothing is offered on nodes that are closed"),
    Obstacle.FAULT: (ReasonCode.FAULT, "a fault keeps {} from use"),
    Obstacle.CORDONED: (ReasonCode.CORDONED, "an operator has cordoned {}"),
    Obstacle.RESET: (ReasonCode.RESET, "a reset must first give {} another MIG mode"),
    Obstacle.DEDICATED: (ReasonCode.DEDICATED, "labels or settings keep {} for other uses"),
    Obstacle.FOREIGN: (ReasonCode.FOREIGN, "partitions that Tessera did not make take the place on {}"),
}

NEAREST = (MigMode.RESET_TO_ENABLE, MigMode.RESET_TO_DISABLE, MigMode.DISABLED, MigMode.ENABLED)
"""MIG modes, the one with the fewest remaining steps first."""

LITERAL = re.compile(r"\.(\w+)\s*==\s*\"([^\"]*)\"")
"""A comparison of an attribute with a string."""

AT_LEAST = re.compile(
    r"""capacity\[[^]]+](?:\.(?P<dotted>\w+)|\["(?P<quoted>\w+)"])"""
    r"""\.compareTo\(quantity\("(?P<amount>[^"]+)"\)\)\s*(?P<than>>=?)\s*0"""
)
"""A comparison of a capacity with the least that is acceptable."""

SHOWN_PRODUCTS = 5
"""Products that a message names."""

NOT_DIVIDED = "no GPU is divided into shares (node plugin: --shares, e.g. nodePlugin.extraArgs={--shares=all=10})"


def held(found: Availability, claim_of: Mapping[tuple[str, str], str]) -> Reason:
    """Too few devices are free, and not because of fragmentation."""
    request, (most, node) = found.request, found.most_free
    if request.count is None:
        free = "on every node that has them some are in use"
    elif most:
        free = f"at most {most} {'is' if most == 1 else 'are'} free on one node ({node})"
    else:
        free = "none is free"
    holders = holders_of((each.entry for each in found.usable), claim_of)
    by = f"; devices there are held by {_claims(holders)}" if holders else ""
    sentence = f"request {request.name} needs {found.needs}: {free}, of {found.products} that have it{by}"
    return Reason(ReasonCode.HELD, sentence + unusable(found) + failing(found))


def _claims(names: Sequence[str]) -> str:
    return f"{len(names)} {'claim' if len(names) == 1 else 'claims'}: {listed(names)}"


def profile_limit(found: Availability, gpus: Sequence[SelectedGpu]) -> Reason:
    """Slices are free, but no further partition of the profile can be created."""
    [key], most = gpus[0].matches.keys, gpus[0].most
    where = listed([f"gpu-{each.entry.number} of {each.entry.node}" for each in gpus])
    sentence = (
        f"request {found.request.name} needs {found.needs}: a GPU can have at most {most} of {key}, and {where} "
        f"{'has' if len(gpus) == 1 else 'have'} as many, although memory is free there"
    )
    return Reason(ReasonCode.LIMIT, sentence + unusable(found) + failing(found))


def fragmented(found: Availability, nodes: Sequence[str], moves: Moves | None) -> Reason:
    """Enough memory is free on one of ``nodes``, but not in one place."""
    gpus = sorted(found.by_node[nodes[0]], key=lambda each: -each.entry.state.free)
    free = sum(each.entry.state.free for each in gpus)
    sentence = (
        f"request {found.request.name} needs {found.needs}: {free:g} memory slices are free on node {nodes[0]}, "
        f"at most {gpus[0].entry.state.free:g} on one GPU (gpu-{gpus[0].entry.number}), but no placement"
    )
    if moves is None:
        where = "within a node" if len(nodes) <= MAX_NODES else f"within one of the {MAX_NODES} nodes with the most"
        way_out = f"; no move of one or two claims {where} was found that would help"
    else:
        way_out = f"; moving {', '.join(map(str, moves.moves))} of node {moves.node} would make room"
    return Reason(ReasonCode.FRAGMENTED, sentence + way_out + unusable(found) + failing(found))


def unusable(found: Availability) -> str:
    """The GPUs that can't provide a device, whatever is held: the end of a sentence."""
    groups: dict[str, list[FleetGpu]] = {}
    for each in found.gpus:
        if each.obstacle is not None:
            named_by_detail = each.obstacle in {Obstacle.EXCLUDED, Obstacle.FAULT, Obstacle.CORDONED, Obstacle.CLOSED}
            groups.setdefault(each.detail if named_by_detail else each.obstacle.value, []).append(each.entry)
    if not groups:
        return ""
    texts = [
        f"{len(gpus)} on {listed(sorted({entry.node for entry in gpus}))}: {text}" for text, gpus in groups.items()
    ]
    return f"; {sum(map(len, groups.values()))} more can't be used ({'; '.join(texts[:SHOWN])})"


def failing(found: Availability) -> str:
    """The GPUs for which the selector fails: the end of a sentence. The scheduler stops when it meets one of them."""
    if found.failure is None:
        return ""
    device = found.failure.device
    return f"; its selector fails on devices like {device.name} of {device.gpu.product_name} ({found.failure.message})"


def selected_nowhere(feasibility: Feasibility, request: DeviceRequest) -> Reason:
    name, selector = request.name, request.selector
    first = next((failure for matches, _ in selector.among(feasibility.fleet) for failure in matches.failures), None)
    if first is None:
        sentence = f"request {name}: {_no_match(feasibility, selector)}"
        return Reason(ReasonCode.NOTHING_MATCHES, sentence, permanent=True)
    sentence = f"request {name}: the selector {first.expression!r} fails on {first.device}: {first.message}"
    return Reason(ReasonCode.SELECTOR_FAILS, sentence, permanent=True)


def _no_match(feasibility: Feasibility, selector: Selector) -> str:
    known = {name: sorted(set(values)) for name, values in _known(feasibility).items()}
    for expression in selector.expressions:
        for name, value in LITERAL.findall(expression):
            if name not in known or value in known[name]:
                continue
            if (name, value) == ("type", DeviceKind.SHARE):
                return NOT_DIVIDED
            if (name, value) == ("type", DeviceKind.PARTITION) or not known[name]:
                products = sorted({entry.gpu.product_name for entry in feasibility.fleet})
                return f"no GPU can be cut into MIG partitions; there are {listed(products, SHOWN_PRODUCTS)}"
            return f"{name} {value}: no GPU has it; there are {', '.join(known[name])}{meant(value, known[name])}"
    if limit := _limit(feasibility, selector.expressions):
        return limit
    texts = " and ".join(selector.expressions)
    return f"no device of the cluster's {len(feasibility.fleet.gpus)} GPUs is selected by {texts}"


def _limit(feasibility: Feasibility, expressions: Sequence[str]) -> str:
    """The largest capacity that there is, where ``expressions`` ask for a larger one; else empty."""
    literals = [literal for expression in expressions for literal in LITERAL.findall(expression)]
    alike = {entry.state.geometry: entry for entry in feasibility.fleet}.values()
    devices = [device for entry in alike for device in entry.devices if _has(device, literals)]
    for match in (found for expression in expressions for found in AT_LEAST.finditer(expression)):
        name, amount, than = match["dotted"] or match["quoted"], match["amount"], match["than"]
        known = [(capacity(device)[name]["value"], device) for device in devices if name in capacity(device)]
        try:
            wanted = parse_quantity(amount).value
            largest, device = max(known, key=lambda each: parse_quantity(each[0]).value)
        except (EvaluationError, ValueError):  # not a quantity, or no device has it
            continue
        most = parse_quantity(largest).value
        if most < wanted or (than == ">" and most == wanted):
            asked = f"{name} {'of more than' if than == '>' else 'of at least'} {amount}"
            return f"{asked}: no device has it; the largest is {largest} ({device.gpu.product_name})"
    return ""


def _has(device: Device, literals: Iterable[tuple[str, str]]) -> bool:
    """Whether it has these values of attributes, as far as it has the attributes."""
    known = attributes(device)
    return all(known[name].get("string") == value for name, value in literals if name in known)


def _known(feasibility: Feasibility) -> dict[str, Iterable[str]]:
    """The values of frequently selected attributes in the cluster."""
    alike = list({(entry.state.geometry, bool(entry.shares)): entry for entry in feasibility.fleet}.values())
    return {
        "type": [device.kind.value for entry in alike for device in entry.devices],
        "profile": [profile.name for entry in alike for profile in entry.gpu.profiles],
        "productName": [entry.gpu.product_name for entry in feasibility.fleet],
        "architecture": [entry.gpu.architecture for entry in feasibility.fleet],
    }


def too_many(feasibility: Feasibility, request: DeviceRequest, nodes: Nodes) -> Reason:
    """No node has so many, whatever is held."""
    if request.count is None:
        asks = f"request {request.name} asks for all devices of a node"
        sentence = f"{asks}: more than the {MAX_DEVICES} that one claim can have"
    else:
        most = feasibility.emptied.most_on_one_node(request, nodes)
        sentence = f"request {request.name} asks for {request.count} devices of one node; no node has more than {most}"
    return Reason(ReasonCode.TOO_MANY, sentence, permanent=True)


def only_elsewhere(what: str, fitting: Sequence[str], excluded: Mapping[str, Excluded], nodes: Nodes) -> Reason:
    """Only the nodes ``fitting`` would do, on which its pod can't run; it can on ``nodes``.

    ``what`` is the beginning of the sentence.
    """
    by_text: dict[str, list[str]] = {}
    for node in fitting:
        if node in excluded:
            by_text.setdefault(excluded[node].text, []).append(node)
    kinds = {kind for node in fitting if node in excluded for kind in excluded[node].kinds}
    if kinds == {Exclusion.NOT_READY}:
        code = ReasonCode.NOT_READY
    elif kinds and kinds <= {Exclusion.NOT_READY, Exclusion.CORDONED}:
        code = ReasonCode.CLOSED
    else:
        code = ReasonCode.OTHER_NODES if nodes else ReasonCode.NO_NODE
    where = "; ".join(f"{listed(names)} {text}" for text, names in sorted(by_text.items()))
    return Reason(code, f"{what} on nodes where its pod can't run: {where}", permanent=True)


def hindered(
    requests: Sequence[DeviceRequest], found: Sequence[Availability], obstacles: Collection[Obstacle]
) -> Reason:
    """Even if nothing were held, ``obstacles`` would be in the way; without one of them it would fit."""
    all_of = [each.obstacles for each in found]
    gpus_of = {obstacle: _joined(each.get(obstacle, ()) for each in all_of) for obstacle in obstacles}
    if not any(gpus_of.values()):
        gpus_of = {obstacle: _joined(each.hindered.get(obstacle, ()) for each in found) for obstacle in obstacles}
    main = max(gpus_of, key=lambda each: (len(gpus_of[each]), each))
    gpus = {entry.entry.gpu.uuid for each in found for entry in each.reachable}
    request = f"request {requests[0].name}: " if len(requests) == 1 else ""
    code, text = OF_OBSTACLE[main]
    if not any(each.usable for each in found):
        sentence = f"{request}{len(gpus)} GPUs have it, but {text.format('them')}"
    else:
        which = f"{len(gpus_of[main])} of the {len(gpus)} GPUs that have it"
        sentence = f"{request}even if nothing were held no node could give all of it: {text.format(which)}"
    if main is Obstacle.RESET:
        steps = reset_steps(gpus_of[main])
    elif main is Obstacle.CLOSED:
        steps = listed(sorted({f"{entry.node} {entry.closed}" for entry in gpus_of[main]}))
    else:
        steps = named(gpus_of[main])
    more = Counter(each.obstacle for one in found for each in one.reachable if each.obstacle not in {None, main})
    also = "; ".join(f"{count} more: {obstacle}" for obstacle, count in more.items())
    return Reason(code, f"{sentence}: {steps}{'; ' + also if also else ''}", permanent=True)


def _joined(parts: Iterable[Iterable[FleetGpu]]) -> tuple[FleetGpu, ...]:
    """The GPUs of all parts, each once."""
    return tuple({entry.gpu.uuid: entry for part in parts for entry in part}.values())


def reset_steps(gpus: Sequence[FleetGpu]) -> str:
    """The GPUs with the fewest remaining steps to another MIG mode, and these steps."""
    modes = {entry.gpu.mig_mode for entry in gpus}
    mode = next((each for each in NEAREST if each in modes), None)
    nearest = [entry for entry in gpus if entry.gpu.mig_mode is mode]
    uuid, gpu = nearest[0].gpu.uuid, f"for gpu-{nearest[0].number}"
    reset, flag = f"nvidia-smi --gpu-reset -i {uuid}", f"--mig-gpus={uuid}"
    match mode:
        case MigMode.RESET_TO_ENABLE | MigMode.RESET_TO_DISABLE:
            steps = f"the new mode is set already, so {gpu}, with nothing running on it: {reset}"
        case MigMode.DISABLED:
            steps = (
                f"{gpu}: start its node plugin with {flag} (nodePlugin.extraArgs={{{flag}}}), "
                f"then, with nothing running on the GPU: {reset}"
            )
        case _:
            steps = (
                f"{gpu}, with nothing running on it: name it no more in its node plugin's --mig-gpus, "
                f"then nvidia-smi -i {uuid} -mig 0, then {reset}"
            )
    return f"{named(nearest)}; {steps}"


def constraint(requirements: ClaimRequirements, when: str, more: str = "", *, permanent: bool = False) -> Reason:
    """The reason where only the constraints of the claim are in the way."""
    names = ", ".join(sorted({each.attribute for each in requirements.constraints}))
    values = "different values" if all(each.distinct for each in requirements.constraints) else "the same value"
    sentence = f"{when} no node has devices for its requests with {values} of {names}{more}"
    return Reason(ReasonCode.CONSTRAINT, sentence, permanent)


def together(requirements: ClaimRequirements, obstacle: str, *, permanent: bool = False) -> Reason:
    """The reason where each request could be met by itself."""
    names = ", ".join(request.name for request in requirements.requests)
    sentence = f"each of the requests {names} could be met, but {obstacle}"
    return Reason(ReasonCode.NOT_TOGETHER, sentence, permanent)


def without_value(feasibility: Feasibility, requirements: ClaimRequirements, nodes: Nodes) -> str:
    """The constrained attributes that no selected device has: the end of a message."""
    missing = {
        each.attribute
        for each in requirements.constraints
        for request in (requirements.requests[index] for index in each.requests)
        if not any(
            feasibility.sets(request, kind, nodes, (each.attribute,))
            for kind in feasibility.kinds(request.selector, nodes)
        )
    }
    return f": none of these devices has a value of {', '.join(sorted(missing))}" if missing else ""
