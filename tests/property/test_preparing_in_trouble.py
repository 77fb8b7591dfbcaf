"""A random life of a node with everything that goes wrong: kills, faults of NVML, disk and API server, lost GPUs,
reboots, damaged files, force-deleted claims. Held against a model of what should be.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from driver.errors import RecoverableError
from driver.hardware.nvml_errors import ABSENT
from driver.placement.occupancy import overlap
from driver.step_observer import Moment
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.step_names import NodeStep
from tests.property.test_preparing_model import CLAIMS, DEVICES, MEMORY, MOMENTS, STEPS, Crash, share_config
from tests.support.care import Care
from tests.support.claim_life import SHARES
from tests.support.claims import result
from tests.support.faulty_files import ERRORS, FaultyFiles, FileTrouble
from tests.support.faulty_nvml import CODES, FaultyHost, Mode, Trouble
from tests.support.invariants import Facts, Place, leftovers, read_facts, violations
from tests.support.node import start_node
from tests.support.nvml_client import end_process, start_process

NVML = st.builds(
    Trouble,
    number=st.integers(0, 25),
    call=st.just("any call"),
    code=st.sampled_from([code for code in CODES if code not in ABSENT]),
    mode=st.sampled_from([Mode.ONCE, Mode.LATE, Mode.DEAD]),
)
FILES = st.builds(
    FileTrouble,
    number=st.integers(0, 20),
    operation=st.just("any operation"),
    error=st.sampled_from(ERRORS),
    lasting=st.booleans(),
)
API = st.just("the API server is away")
DISASTERS = ["restart", "reboot", "reset", "lose_gpu", "damage_record", "damage_spec"]
TROUBLES = st.one_of(st.none(), NVML, FILES, API, st.tuples(STEPS, MOMENTS))


class NodeInTrouble(RuleBasedStateMachine):
    """One H100.

    claims    what the API server has, by name
    promised  uids of the claims that the kubelet was told are prepared, and that nothing has happened to since
    foreign   partitions whose record and CDI spec somebody deleted: nobody's, and to be left alone
    aside     partitions and uids of claims whose record is unreadable or missing
    """

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="tessera-trouble-", dir=MEMORY))
        self.kill_at: tuple[NodeStep, Moment] | None = None
        self.node = start_node(self.root, None, self.observe, "h100-1", sharing=SHARES, open_host=FaultyHost)
        self.care = Care(self.node)
        self.claims: dict[str, ClaimReference] = {}
        self.promised: set[str] = set()
        self.foreign: set[Place] = set()
        self.aside: dict[str, frozenset[Place]] = {}
        self.busy: set[str] = set()
        self.lost = False

    def observe(self, step: NodeStep, moment: Moment) -> None:
        if (step, moment) == self.kill_at:
            self.kill_at = None
            raise Crash

    # Claims

    @rule(
        name=CLAIMS,
        devices=st.lists(st.sampled_from(DEVICES), min_size=1, max_size=2, unique=True),
        interval=st.sampled_from([None, None, None, "Short"]),
        trouble=TROUBLES,
    )
    def allocate(self, name: str, devices: list[str], interval: str | None, trouble: object) -> None:
        """A claim is allocated, or anew, and its pod started; nobody asks whether it fits."""
        self._allocate(name, devices, interval)
        self.prepare(name, trouble)

    def _allocate(self, name: str, devices: list[str], interval: str | None) -> None:
        known = self.claims.get(name)
        if known is not None and known.uid in self.aside:
            return  # a claim is deallocated only after it was unprepared
        results = [result(device, f"r{index}") for index, device in enumerate(devices)]
        self.claims[name] = self.node.api.allocate(name, *results, config=[share_config(interval)] if interval else [])
        self.promised.discard(self.claims[name].uid)

    @rule(name=CLAIMS)
    def force_delete(self, name: str) -> None:
        """The claim is gone before it was unprepared; its devices may be given to others."""
        if (claim := self.claims.pop(name, None)) is not None:
            self.node.api.delete(claim)
            self.promised.discard(claim.uid)

    @rule(name=CLAIMS, trouble=TROUBLES)
    def prepare(self, name: str, trouble: object) -> None:
        if (claim := self.claims.get(name)) is None:
            return
        with self.in_trouble(trouble):
            try:
                answer = self.node.preparer.prepare(claim)
            except RecoverableError:
                return
            wanted = self.node.api.claims["default", name].status.allocation
            assert wanted is not None
            assert {each.device for each in answer} == {each.device for each in wanted.devices.results}
            self.promised.add(claim.uid)

    @rule(pick=st.integers(0, 3), trouble=TROUBLES)
    def unprepare_one(self, pick: int, trouble: object) -> None:
        """Of those that are prepared."""
        promised = [name for name, claim in self.claims.items() if claim.uid in self.promised]
        for name in promised[pick % len(promised) :][:1] if promised else ():
            self.unprepare(name, trouble)

    @rule(name=CLAIMS, trouble=TROUBLES)
    def unprepare(self, name: str, trouble: object) -> None:
        if (claim := self.claims.get(name)) is None:
            return
        self.promised.discard(claim.uid)
        answered = False
        with self.in_trouble(trouble), suppress(RecoverableError):
            self.node.preparer.unprepare(claim)
            answered = True
        # Only now: as long as files are in trouble, this look would be, too.
        assert not (answered and f"{claim.uid}.json" in self.node.records())

    # Trouble

    @contextmanager
    def in_trouble(self, trouble: object) -> Iterator[None]:
        """A fault of some kind, or a kill and a new start, while the block runs."""
        if isinstance(trouble, tuple):
            self.kill_at = trouble
        self.node.api.away = isinstance(trouble, str)
        try:
            with self.fault(trouble):
                yield
        except Crash:
            self.restart()
        finally:
            self.kill_at, self.node.api.away = None, False

    def fault(self, trouble: object) -> AbstractContextManager[object]:
        if isinstance(trouble, FileTrouble):
            return FaultyFiles(self.root / "state", self.root / "cdi").faults(trouble)
        assert isinstance(self.node.host, FaultyHost)
        return self.node.host.faulty.faults(trouble if isinstance(trouble, Trouble) else None)

    def restart(self) -> None:
        self.kill_at = None
        self.node = self.node.restart(self.observe, SHARES)
        self.care = Care(self.node)

    def reboot(self) -> None:
        """Partitions, CDI directory and processes are gone; the kubelet asks for what it still needs."""
        self.return_gpu()
        self.node.simulated.reboot()
        for path in (self.root / "cdi").iterdir():
            path.unlink()
        self.no_hardware()
        self.promised.clear()
        self.restart()

    def reset(self) -> None:
        if self.lost or self.busy:
            return
        self.node.simulated.reset_gpu(0)
        self.no_hardware()

    def no_hardware(self) -> None:
        self.foreign.clear()
        self.busy.clear()
        self.aside = dict.fromkeys(self.aside, frozenset())

    def lose_gpu(self) -> None:
        if not self.lost:
            self.lost = True
            self.node.simulated.faults.lose_gpu(0)
        self.look()

    def return_gpu(self) -> None:
        """A GPU that fell off the bus comes back with a reset."""
        if self.lost:
            self.lost = False
            self.node.simulated.faults.return_gpu(0)
            for device in self.busy:
                end_process(self.node.simulated, device, pid=7)
            self.node.simulated.reset_gpu(0)
            self.no_hardware()
        self.look()

    @rule(name=CLAIMS, what=st.sampled_from(DISASTERS), content=st.sampled_from([None, b"", b"{", b'{"version": 7}']))
    def disaster(self, name: str, what: str, content: bytes | None) -> None:
        """Something big; one that lasts ends with the next."""
        if self.lost:
            self.return_gpu()
        elif what.startswith("damage"):
            getattr(self, what)(name, content)
        else:
            getattr(self, what)()

    def look(self) -> None:
        """The scanner's turn; what stands on a GPU that has come back it knows after two."""
        for _ in range(2):
            self.node.scanner.scan(self.node.node.inventory)
            self.node.node.hold_all()

    @rule(pick=st.integers(0, 6))
    def use(self, pick: int) -> None:
        """A process takes hold of a partition, or lets go of it."""
        standing = [str(row["uuid"]) for _, row in self.facts().partitions() if row["uuid"]]
        if not standing:
            return
        device = standing[pick % len(standing)]
        if device in self.busy:
            self.busy.discard(device)
            end_process(self.node.simulated, device, pid=7)
        else:
            self.busy.add(device)
            start_process(self.node.simulated, device, pid=7)

    def damage_record(self, name: str, content: bytes | None) -> None:
        """Somebody deletes or garbles a claim's record (None: deletes), and the plugin starts again."""
        claim = self.claims.get(name)
        record = self.node.node.checkpoint.get(claim.uid) if claim else None
        # The interval of a share is known from its record alone.
        if record is None or record.needs_release or any(entry.time_slice for entry in record.devices):
            return
        places = self.places(record.uid)
        path = self.node.node.checkpoint.path(record.uid)
        self.promised.discard(record.uid)
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        self.aside[record.uid] = places
        if not self.spec(record.uid).exists():
            self.foreign |= places
        self.restart()

    def damage_spec(self, name: str, content: bytes | None) -> None:
        for claim in [self.claims[name]] if name in self.claims else []:
            path = self.spec(claim.uid)
            if not path.exists():
                return
            if content is None:
                path.unlink()
                self.foreign |= self.aside.get(claim.uid, frozenset())
            elif claim.uid not in self.aside:  # there the spec is all that is left of what it had
                path.write_bytes(content)
                self.node.preparer.prepare(claim) if self.can_repeat(claim) else path.unlink()

    def spec(self, uid: str) -> Path:
        return self.root / "cdi" / f"gpu.tessera.dev-claim_{uid}.json"

    def can_repeat(self, claim: ClaimReference) -> bool:
        return not self.lost and claim.uid in self.promised

    @precondition(lambda self: not self.lost and not self.busy)
    @rule()
    def settle(self) -> None:
        """With nothing in the way the reconciler brings everything in order, though nobody asks."""
        self.look()
        for _ in range(3):
            self.care.look(after_s=15)
        facts, boot = self.known(), self.node.node.boot
        # What a reboot took is made again when the kubelet asks for it.
        now = [record for record in facts.records if record.boot == boot]
        assert violations(replace(facts, records=now)) == []

    # What holds always

    @invariant()
    def partitions_specs_and_memory_belong_to_one_claim(self) -> None:
        """And what is recorded is known to the process, and what was promised is recorded."""
        facts = self.known()
        assert violations(facts, at_rest=False) == []
        assert {record.uid for record in facts.records} <= {r.uid for r in self.node.node.checkpoint.records()}
        assert self.promised <= {record.uid for record in facts.records if not record.needs_release}

    @invariant()
    def offers_never_overlap_what_is_held(self) -> None:
        for entry in self.node.node.inventory.published():
            for held in entry.held:
                assert not [offer.name for offer in entry.offers if overlap(offer, held)]

    def places(self, uid: str) -> frozenset[Place]:
        """The partitions of a recorded claim that stand."""
        facts, standing = self.facts(), {place for place, _ in self.facts().partitions()}
        mine = {(d.gpu_uuid, d.profile, d.start) for record, d in facts.held() if record.uid == uid}
        return frozenset(place for place in standing if place in mine)

    def facts(self) -> Facts:
        found = read_facts(self.node.simulated, self.root / "state", self.root / "cdi")
        return replace(found, temporary=())

    def known(self) -> Facts:
        """The facts, without what a record that can't be read explains."""
        facts = self.facts()
        recorded = {record.uid for record in facts.records}
        waiting = {uid: places for uid, places in self.aside.items() if uid not in recorded}
        self.aside = {uid: places for uid, places in waiting.items() if uid in self.node.node.checkpoint.unrecorded}
        explained = frozenset(place for places in self.aside.values() for place in places)
        specs = {uid: spec for uid, spec in facts.specs.items() if uid not in self.aside}
        return replace(facts, foreign=explained | self.foreign, specs=specs)

    def teardown(self) -> None:
        """Whatever happened: when every claim is gone nothing is left but what was never ours to remove."""
        self.return_gpu()
        for device in self.busy:
            end_process(self.node.simulated, device, pid=7)
        self.node.api.claims.clear()
        for claim in self.claims.values():
            with suppress(RecoverableError):
                self.node.preparer.unprepare(claim)
        self.care.look_long()
        assert leftovers(replace(self.facts(), foreign=frozenset(self.foreign))) == []
        shutil.rmtree(self.root)


TestNodeInTrouble = NodeInTrouble.TestCase
TestNodeInTrouble.settings = settings(max_examples=settings().max_examples // 3, stateful_step_count=30, deadline=None)
