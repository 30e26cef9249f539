"""The counter between the learner and the federation link, which live in two threads.

The link's thread reads the learner's latest snapshot and lays down what comes from the hub; the
learner's loop takes it up between two rounds and says so once it is on disk.
"""

import threading
from dataclasses import dataclass, field

from agent.federation import LocalState, SharedPolicy
from common.speeds import Peers


@dataclass
class Offer:
    """A policy from the hub that waits for the learner's decision."""

    policy: SharedPolicy
    answer: bool | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Handover:
    """Implements :class:`agent.federation.Learner` for the link's thread.

    Args:
        first: the learner's state before its first round.
        patience_seconds: how long :meth:`adopt` waits for the learner to reach the end of a round.
    """

    def __init__(self, first: LocalState, *, patience_seconds: float = 60.0) -> None:
        self._lock = threading.Lock()
        self._local = first
        self._offer: Offer | None = None
        self._peers: Peers | None = None
        self._patience = patience_seconds
        self._closed = False
        self.offered = threading.Event()
        """Set while something waits for the learner."""

    # ---- the link's side ----

    def local(self) -> LocalState:
        """The snapshot of the latest committed round."""
        with self._lock:
            return self._local

    def adopt(self, policy: SharedPolicy) -> bool:
        """Offer a policy and wait until the learner has committed it; False where it did not."""
        offer = Offer(policy)
        with self._lock:
            if self._closed:
                return False
            self._offer = offer
            self.offered.set()
        offer.done.wait(self._patience)
        with self._lock:
            if self._offer is offer:  # never taken up: it must not be adopted behind our answer
                self._offer = None
                return False
        # It was taken up; the commit follows within the round.
        offer.done.wait()
        return bool(offer.answer)

    def adopt_speeds(self, peers: Peers) -> None:
        """Lay down the peers' speeds; the newest table counts."""
        with self._lock:
            self._peers = peers
            self.offered.set()

    # ---- the learner's side ----

    def publish(self, local: LocalState) -> None:
        """Show a snapshot to the link; its arrays must not change any more."""
        with self._lock:
            self._local = local

    def take(self) -> tuple[Offer | None, Peers | None]:
        """What waits, taken off the counter; answer the offer with :meth:`settle`."""
        with self._lock:
            offer, peers = self._offer, self._peers
            self._offer = self._peers = None
            self.offered.clear()
            return offer, peers

    @staticmethod
    def settle(offer: Offer | None, adopted: bool) -> None:
        """Tell the link what became of an offer that was taken."""
        if offer is not None:
            offer.answer = adopted
            offer.done.set()

    def close(self) -> None:
        """Refuse what waits and what comes; the learner is stopping."""
        with self._lock:
            self._closed = True
            offer, self._offer = self._offer, None
        self.settle(offer, False)
