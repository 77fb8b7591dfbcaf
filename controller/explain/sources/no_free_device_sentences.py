"""The sentences of reasons, from what is available (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from controller.cluster.fleet import FleetGpu
from controller.demand.feasibility import Feasibility, Nodes
from controller.demand.node_eligibility import Excluded, Exclusion
from controller.demand.pending_claims import Holders
from controller.demand.requirements import ClaimRequirements, DeviceRequest
from controller.explain.reason import Reason, ReasonCode
from controller.explain.sources.selected_gpus import (
    SHOWN,
    Availability,
    Obstacle,
    SelectedGpu,
    SelectedGpus,
    by_obstacle,
    held_by,
    kept_by,
    listed,
    named,
    numbered,
)
from controller.explain.sources.selector_sentences import failing
from deviceclasses.cel.library.quantity import parse_quantity
from deviceclasses.lint.selectors.attribute_catalogue import why_without
from driver.kube.types import MAX_DEVICES, Request
from driver.model.gpu import MigMode
from driver.model.offer import SHARED, DeviceKind
from driver.model.shared_memory import GIB

OF_OBSTACLE = {
    Obstacle.CLOSED: (ReasonCode.CLOSED, "nothing is offered on nodes that are closed"),
    Obstacle.FAULT: (ReasonCode.FAULT, "a fault keeps {} from use"),
    Obstacle.CORDONED: (ReasonCode.CORDONED, "an operator has cordoned {}"),
    Obstacle.RESERVED: (ReasonCode.DEDICATED, "another driver of the node manages {}"),
    Obstacle.ADOPTED: (ReasonCode.HELD, "claims that NVIDIA's DRA driver prepared hold {}"),
    Obstacle.TAINTED: (ReasonCode.TAINTED, "a DeviceTaintRule taints {}, which no request of the claim tolerates"),
    Obstacle.RESET: (ReasonCode.RESET, "a reset must first give {} another MIG mode"),
    Obstacle.DEDICATED: (ReasonCode.DEDICATED, "a label or a setting keeps {} for other uses"),
    Obstacle.FOREIGN: (ReasonCode.FOREIGN, "partitions that Tessera did not make take the place on {}"),
}

MAX_OF_ALTERNATIVE = 120
"""Characters of the reason of an alternative that is not reported first."""

OF_NODES = {Obstacle.EXCLUDED, Obstacle.CLOSED}
"""Obstacles that concern all GPUs of a node."""

NEAREST = (MigMode.RESET_TO_ENABLE, MigMode.RESET_TO_DISABLE, MigMode.DISABLED, MigMode.ENABLED)
"""MIG modes, the one with the fewest remaining steps first."""


def held(available: Availability, holders: Holders) -> Reason:
    """Too few devices are free, and not because of fragmentation."""
    request, (most, node) = available.request, available.selected.most_free
    by = held_by([available], holders)
    if available.selected.keys == {SHARED} and (most_left := _most_left(available)):
        return _of_request(available, ReasonCode.HELD, most_left + by)
    if not most and {kind.type for kind in available.selected.keys} == {DeviceKind.SHARED_PARTITION}:
        free = "no compute slice is left in the partitions"
    elif request.count is None:
        free = "on every node that has them some are in use"
    elif most:
        free = f"at most {most} {'is' if most == 1 else 'are'} free on one node ({node})"
    else:
        free = "none is free"
    return _of_request(available, ReasonCode.HELD, f"{free}, of {available.selected.products} that have it{by}")


def _most_left(available: Availability) -> str:
    """The shared GPU with the most memory left, and what the claim asks; empty if none is held as a shared one."""
    shared = [gpu for gpu in available.selected.usable if gpu.entry.state.used]
    if not shared:
        return ""
    gpu = max(shared, key=lambda gpu: gpu.entry.state.left)
    fleet_gpu = gpu.entry
    state, gib = fleet_gpu.state, gpu.matches.gib
    asks = f"{gib}" if available.request.count in {1, None} else f"{available.request.count} times {gib}"
    memory = available.request.selector.memory
    if memory is not None and parse_quantity(str(memory)).value != gib * GIB:
        asks += f" ({memory}, rounded up to whole GiB)"
    count = len(available.selected.usable)
    most = "" if count == 1 else f", the most of {count} shared GPUs"
    name = f"gpu-{fleet_gpu.number} of {fleet_gpu.node}"
    if state.clients == 0 and fleet_gpu.shared:
        clients = fleet_gpu.shared.clients(fleet_gpu.gpu.cuda_driver_version)
        return f"{name} has room for {clients} claims by MPS, all of them taken"
    return f"{name} has {state.left} GiB left of {state.room}{most}, the claim asks {asks}"


def profile_limit(available: Availability, gpus: Sequence[SelectedGpu]) -> Reason:
    """Slices are free, but no further partition of the profile can be created."""
    [key], most = gpus[0].matches.starts_by_kind, gpus[0].most
    where = listed([f"gpu-{gpu.entry.number} of {gpu.entry.node}" for gpu in gpus])
    sentence = (
        f"a GPU can have at most {most} of {key}, and {where} {'has' if len(gpus) == 1 else 'have'} as many, although "
        "memory is free there"
    )
    return _of_request(available, ReasonCode.LIMIT, sentence)


def fragmented(available: Availability, node: str) -> Reason:
    """Enough memory is free on ``node``, but not in one place."""
    gpus = sorted(available.selected.by_node[node], key=lambda gpu: -gpu.entry.state.free)
    free = sum(gpu.entry.state.free for gpu in gpus)
    largest = f"{gpus[0].entry.state.free:g} on one GPU (gpu-{gpus[0].entry.number})"
    sentence = f"{free:g} memory slices are free on node {node}, at most {largest}, but no placement"
    return _of_request(available, ReasonCode.FRAGMENTED, sentence)


def _of_request(available: Availability, code: ReasonCode, text: str) -> Reason:
    """``text`` between what is requested and what can not be used for it."""
    sentence = f"request {available.request.name} needs {available.needs}: {text}"
    return Reason(code, sentence + _unusable(available) + failing(available.failure))


def _unusable(available: Availability) -> str:
    """The GPUs that can't provide a device, whatever is held: the end of a sentence."""
    groups: dict[tuple[Obstacle, str], list[FleetGpu]] = {}
    for gpu in available.selected.gpus:
        if gpu.blocked_by is not None:
            groups.setdefault((gpu.blocked_by, gpu.detail or gpu.blocked_by.value), []).append(gpu.entry)
    if not groups:
        return ""
    texts = [
        f"{len(gpus)} on {listed(sorted({entry.node for entry in gpus}))}: {text}"
        if obstacle in OF_NODES
        else f"{numbered(gpus)}: {text}"
        for (obstacle, text), gpus in groups.items()
    ]
    return f"; {sum(map(len, groups.values()))} more can't be used ({'; '.join(texts[:SHOWN])})"


def too_many(feasibility: Feasibility, request: DeviceRequest, nodes: Nodes) -> Reason:
    """No node has so many, whatever is held."""
    if request.count is None:
        asks = f"request {request.name} asks for all devices of a node"
        sentence = f"{asks}: more than the {MAX_DEVICES} that one claim can have"
    else:
        most = feasibility.ideal.most_on_one_node(request, nodes)
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
    each_of = {text: "each of " if len(names) > 1 else "" for text, names in by_text.items()}
    where = "; ".join(f"{each_of[text]}{listed(names)} {text}" for text, names in sorted(by_text.items()))
    return Reason(code, f"{what} on nodes where its pod can't run: {where}", permanent=True)


def obstructed(requests: Sequence[DeviceRequest], selected: Sequence[SelectedGpus], obstacles: Set[Obstacle]) -> Reason:
    """Even if nothing were held, ``obstacles`` would be in the way; without one of them it would fit."""
    blocked = by_obstacle(selected, blocked=True)
    gpus_of = blocked if obstacles & blocked.keys() else by_obstacle(selected)
    main = max(obstacles & gpus_of.keys(), key=lambda obstacle: (len(gpus_of[obstacle]), obstacle))
    gpus = {entry.entry.gpu.uuid for selection in selected for entry in selection.reachable}
    request = f"request {requests[0].name}: " if len(requests) == 1 else ""
    code, text = OF_OBSTACLE[main]
    if not any(selection.usable for selection in selected):
        have, them = ("1 GPU has", "it") if len(gpus) == 1 else (f"{len(gpus)} GPUs have", "them")
        sentence = f"{request}{have} it, but {text.format(them)}"
    else:
        which = f"{len(gpus_of[main])} of the {len(gpus)} GPUs that have it"
        sentence = f"{request}even if nothing were held no node could give all of it: {text.format(which)}"
    if main is Obstacle.RESET:
        steps = reset_steps(gpus_of[main])
    elif main is Obstacle.CLOSED:
        steps = listed(sorted({f"{entry.node} {entry.why_no_offers}" for entry in gpus_of[main]}))
    elif main is Obstacle.DEDICATED:
        steps = _dedicated(gpus_of[main])
    else:
        steps = named(gpus_of[main]) + ("; on the node: nvidia-smi mig -lgi" if main is Obstacle.FOREIGN else "")
    others = ((obstacle, kept) for obstacle, kept in blocked.items() if obstacle is not main)
    also = "; ".join(f"{len(kept)} more: {obstacle} ({numbered(kept)})" for obstacle, kept in others)
    return Reason(code, f"{sentence}: {steps}{'; ' + also if also else ''}", permanent=True)


def _dedicated(gpus: Sequence[FleetGpu]) -> str:
    """What keeps ``gpus`` for other uses, and how the first label is removed."""
    causes: dict[str, list[FleetGpu]] = {}
    for gpu in gpus:
        causes.setdefault(kept_by(gpu), []).append(gpu)
    texts = [f"{numbered(kept)} ({cause})" for cause, kept in causes.items()]
    remedies = [f"kubectl label node {gpu.node} {gpu.dedicated_by.name}-" for gpu in gpus if gpu.dedicated_by]
    return "; ".join([*texts[:SHOWN], *remedies[:1]])


def reset_steps(gpus: Sequence[FleetGpu]) -> str:
    """The GPUs with the fewest remaining steps to another MIG mode, and these steps."""
    modes = {entry.gpu.mig_mode for entry in gpus}
    mode = next((mode for mode in NEAREST if mode in modes), None)
    nearest = sorted((entry for entry in gpus if entry.gpu.mig_mode is mode), key=lambda entry: bool(entry.held))
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
    names = ", ".join(sorted({constraint.attribute for constraint in requirements.constraints}))
    values = (
        "different values" if all(constraint.distinct for constraint in requirements.constraints) else "the same value"
    )
    sentence = f"{when} no node has devices for its requests with {values} of {names}{more}"
    return Reason(ReasonCode.CONSTRAINT, sentence, permanent)


def together(available: Sequence[Availability], obstacle: str, *, permanent: bool = False) -> Reason:
    """The reason where each request could be met by itself."""
    names = ", ".join(availability.request.name for availability in available)
    needs = "; ".join(
        f"{availability.request.name} needs {availability.needs}{availability.where}" for availability in available
    )
    sentence = (
        f"each of the requests {names} could be met, but {obstacle} (a claim gets all devices of one node): {needs}"
    )
    return Reason(ReasonCode.NOT_TOGETHER, sentence, permanent)


def without_value(feasibility: Feasibility, requirements: ClaimRequirements, nodes: Nodes) -> str:
    """The constrained attributes that no device selected by a request has: the end of a message."""
    missing: dict[str, list[str]] = {}
    for constraint in requirements.constraints:
        for request in (requirements.requests[index] for index in sorted(constraint.requests)):
            kinds = feasibility.kinds(request.selector, nodes)
            if not any(feasibility.gpu_sets(request, kind, nodes, (constraint.attribute,)) for kind in kinds):
                missing.setdefault(constraint.attribute, []).append(request.name)
    texts = []
    for attribute, names in missing.items():
        whose = "none of these devices" if len(requirements.requests) == 1 else f"no device of request {listed(names)}"
        types = {
            selected.kind.type
            for request in requirements.requests
            if request.name in names
            for selected in feasibility.kinds(request.selector, nodes)
        }
        why = why_without(attribute, types, feasibility.matching.driver)
        texts.append(f"{whose} has a value of {attribute}{f' ({why})' if why else ''}")
    return f": {'; '.join(texts)}" if texts else ""


def of_alternatives(best: Reason, reasons: Sequence[Reason], requests: Iterable[Request]) -> Reason:
    """``best`` of the ``reasons`` of a claim's alternatives, with the others."""
    names = [
        request.name_of(alternative)
        for request in requests
        for alternative in request.alternatives
        if len(request.alternatives) > 1
    ]
    others = sorted({str(reason.code) for reason in reasons if reason.code is not best.code})
    if len(names) == len(reasons):  # only one request has alternatives
        named_reasons = zip(names, reasons, strict=True)
        others = [_of_alternative(name, reason, best) for name, reason in named_reasons if reason is not best][:SHOWN]
    is_only = not best.permanent and sum(not reason.permanent for reason in reasons) == 1
    which = "the only one that can become free" if is_only else "one"
    return replace(
        best, sentence=f"{best.sentence} ({'; '.join((f'{which} of the alternatives {listed(names, 8)}', *others))})"
    )


def _of_alternative(name: str, reason: Reason, best: Reason) -> str:
    """The beginning of the reason of the alternative ``name``, if it is not of the kind of the ``best``."""
    if reason.code is best.code:
        return f"{name}: likewise"
    sentence = f"{name}: {reason.sentence.removeprefix('request ').removeprefix(name).removeprefix(': ').strip()}"
    return sentence if len(sentence) <= MAX_OF_ALTERNATIVE else f"{sentence[:MAX_OF_ALTERNATIVE]}..."
