"""NodeChanges of node views, as the controller's caches report them."""

from __future__ import annotations

from collections.abc import Sequence

from controller.cluster.fleet import Fleet
from controller.cluster.fleet_builder import FleetBuilder
from controller.cluster.node_views import NodeChanges, NodeView


def changes(after: Sequence[NodeView], before: Sequence[NodeView] = ()) -> NodeChanges:
    """What changed from ``before`` to ``after``."""
    known = {view.name: view for view in before}
    changed = [view for view in after if view != known.get(view.name)]
    gone = known.keys() - {view.name for view in after}
    names = {view.name for view in changed} | gone
    return NodeChanges(frozenset(names), {}, changed, bool(gone) or any(view.name not in known for view in changed))


def fleet_of(*views: NodeView) -> Fleet:
    """The fleet of a controller that has just started."""
    return FleetBuilder().build(views, changes(views))
