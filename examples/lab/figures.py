"""What processes tell of themselves in Prometheus' format; read for the end table of the demo."""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families


class Sample(NamedTuple):
    """One line of an exposition."""

    labels: Mapping[str, str]
    value: float


class Figures:
    """An exposition, by the names of its series."""

    def __init__(self, text: str) -> None:
        self._samples: defaultdict[str, list[Sample]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name].append(Sample(sample.labels, sample.value))

    def _chosen(self, name: str, labels: Mapping[str, str]) -> list[Sample]:
        return [s for s in self._samples[name] if labels.items() <= s.labels.items()]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series of that name and with these labels; 0 where there is none."""
        return sum(sample.value for sample in self._chosen(name, labels))

    def by(self, name: str, label: str) -> dict[str, int]:
        """Counts of that name by the value of a label."""
        found: defaultdict[str, int] = defaultdict(int)
        for sample in self._samples[name]:
            found[sample.labels[label]] += int(sample.value)
        return dict(found)

    def quantile(self, name: str, share: float, **labels: str) -> float | None:
        """A histogram's quantile, interpolated within its bucket as Prometheus does.

        None where nothing was observed; the last finite bound where it lies beyond.
        """
        counts: defaultdict[float, float] = defaultdict(float)
        for sample in self._chosen(f"{name}_bucket", labels):
            counts[float(sample.labels["le"])] += sample.value
        bounds = sorted(counts)
        if not bounds or not counts[bounds[-1]]:
            return None
        rank = share * counts[bounds[-1]]
        lower, below = 0.0, 0.0
        for bound in bounds[:-1]:
            if counts[bound] >= rank and counts[bound] > below:
                return lower + (bound - lower) * (rank - below) / (counts[bound] - below)
            lower, below = bound, counts[bound]
        return lower
