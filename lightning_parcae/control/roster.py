"""Who is alive: the table of instances, whom to let in, and whose lease is over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lightning_parcae.control.membership import Instance
from lightning_parcae.control.messages import PROTOCOL_VERSION, Fenced, Hello, Stop, Welcome
from lightning_parcae.errors import EXIT_REFUSED

MIN_WARM_UP_LEASE_S = 30.0


class Roster:
    """The living instances by name, in the order in which they joined.

    Args:
        failure_timeout_s: Silence after which an instance is dead, in seconds.
    """

    def __init__(self, failure_timeout_s: float) -> None:
        self._failure_timeout_s = failure_timeout_s
        self._living: dict[str, Instance] = {}
        self._dead: dict[str, str] = {}  # incarnation -> why
        self._leaving: set[str] = set()
        self._num_joined = 0
        self._names: set[str] = set()
        self._versions: dict[str, str] = {}

    def __getitem__(self, name: str) -> Instance:
        return self._living[name]

    def __contains__(self, name: object) -> bool:
        return name in self._living

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._living))

    def __len__(self) -> int:
        return len(self._living)

    def get(self, name: str) -> Instance | None:
        """Return a living instance, or None."""
        return self._living.get(name)

    def values(self) -> list[Instance]:
        """Return the living instances."""
        return list(self._living.values())

    @property
    def num_names(self) -> int:
        """How many different names have ever joined."""
        return len(self._names)

    def admit(self, hello: Hello, now: float, *, versions_are_fixed: bool) -> Instance | Fenced | Stop:
        """Let an instance in, or say why not.

        Args:
            hello: How it introduces itself.
            now: The time.
            versions_are_fixed: Whether the job keeps its versions even if no instance is alive.

        Returns:
            Its record, the old one if only its connection is new; or the message that refuses it.
        """
        name, known = hello.instance, self._living.get(hello.instance)
        if hello.incarnation in self._dead:
            why = self._dead[hello.incarnation]
            return Fenced(f"{name} was declared dead ({why}); the job has gone on without it")
        if known is not None and known.hello.incarnation == hello.incarnation:
            known.last_seen = now
            return known
        if known is not None:
            reason = (
                f"an instance named {name} is alive already (host {known.hello.host}, pid {known.hello.pid}); give "
                f"each instance its own name; if that one is gone, start again after {self._failure_timeout_s:g} s"
            )
            return Stop(graceful=False, reason=reason, exit_code=EXIT_REFUSED)
        if not self._living and not versions_are_fixed:
            self._versions = dict(hello.versions)
        complaint = self._compare(hello)
        if complaint is not None:
            return Stop(graceful=False, reason=complaint, exit_code=EXIT_REFUSED)
        instance = Instance(hello=hello, order=self._num_joined, last_seen=now)
        self._living[name] = instance
        self._num_joined += 1
        self._names.add(name)
        return instance

    def _compare(self, hello: Hello) -> str | None:
        if hello.protocol != PROTOCOL_VERSION:
            return f"protocol version {PROTOCOL_VERSION} is spoken here, but {hello.protocol} by {hello.instance}"
        for package in sorted({*self._versions, *hello.versions}):
            ours, theirs = self._versions.get(package), hello.versions.get(package)
            if ours != theirs:
                return (
                    f"the job runs with {package} {ours}, but {hello.instance} has {package} {theirs}: "
                    "install the same versions on every instance"
                )
        return None

    def welcome(self, instance: Instance, *, started: bool, generation: int, run_dir: str | None) -> Welcome:
        """Return what a new or reconnected instance is told first."""
        older = [other for other in self._living.values() if other.order < instance.order]
        return Welcome(
            instance=instance.hello.instance,
            order=instance.order,
            leader=not started and not older,
            host_rank=sum(other.hello.host == instance.hello.host for other in older),
            generation=generation,
            run_dir=run_dir,
        )

    def is_oldest_of_host(self, name: str) -> bool:
        """Whether no living instance of the same host joined before."""
        me = self._living[name]
        return all(other.order >= me.order for other in self._living.values() if other.hello.host == me.hello.host)

    def remove(self, name: str, reason: str) -> Instance:
        """Take an instance out; its process can never come back."""
        instance = self._living.pop(name)
        self._leaving.discard(name)
        self._dead[instance.hello.incarnation] = reason
        return instance

    def give_notice(self, name: str, leaves_at: float | None) -> None:
        """Note that an instance will be taken away, and when, if known."""
        instance = self._living[name]
        instance.leaving, instance.leaves_at = True, leaves_at
        self._leaving.add(name)

    @property
    def leaving(self) -> list[str]:
        """The living instances with a notice, in the order in which they joined."""
        return sorted(self._leaving, key=lambda name: self._living[name].order)

    def overdue(self, now: float) -> list[str]:
        """Return the instances whose lease is over."""
        return [name for name, instance in self._living.items() if now - instance.last_seen > self._lease_s(instance)]

    def _lease_s(self, instance: Instance) -> float:
        # Imports and set-up can keep the interpreter busy for long, and nobody waits for a warming instance.
        warming = instance.ready is None
        return max(3 * self._failure_timeout_s, MIN_WARM_UP_LEASE_S) if warming else self._failure_timeout_s

    def renew(self, now: float) -> None:
        """Renew every lease."""
        for instance in self._living.values():
            instance.last_seen = now

    def usable(self, *, besides: Iterable[str] = ()) -> list[str]:
        """Return the instances that can be given work that lasts, without some of them."""
        excluded = set(besides)
        return [name for name, instance in self._living.items() if instance.is_usable and name not in excluded]

    def addresses(self, names: Iterable[str]) -> dict[str, tuple[str, str]]:
        """Return the state and store addresses of ready instances."""
        ready = {name: self._living[name].ready for name in names}
        return {name: (item.state_address, item.store_address) for name, item in ready.items() if item is not None}

    def step_of(self, names: Iterable[str]) -> int:
        """Return how many optimizer steps the foremost of some instances has made."""
        return max((self._living[name].step for name in names if name in self._living), default=0)
