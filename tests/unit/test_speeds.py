"""The speed model: recovers measured orders, gains from peers, shrugs off a liar."""

import math

import numpy as np
import pytest

from agent.cluster.speeds_file import check
from agent.journal import Progress
from agent.learning.speeds import SpeedModel, SpeedPrior, beside_text, sample, speed_text
from agent.simulator.hardware import load_speeds
from common.speeds import Peers, SpeedRow, SpeedTable, add, speed_key
from common.speeds import check as check_rows

TABLE = load_speeds()
MODELS = TABLE.gpu_types
KINDS = [
    (TABLE.job_types[j], int(g)) for j, g in zip(TABLE.kind_type, TABLE.kind_gpus, strict=True)
]
LOG_SPEED = np.log(TABLE.speed)
SLOWDOWN = LOG_SPEED.max(axis=1, keepdims=True) - LOG_SPEED


def reading(**values: object) -> Progress:
    fields = {
        "uid": "u",
        "time": 0.0,
        "job_type": "LM",
        "gpus": 1,
        "gpu_model": "V100",
        "steps_per_second": math.e**2,
        "neighbours": [],
    }
    return Progress(**{**fields, **values})  # type: ignore[arg-type]  # fields of several types


def observe(seed: int, cells: int, shift: float = 0.0) -> dict[str, tuple[float, float, float]]:
    """Sums of ``cells`` random cells of the measured table, three readings each, 5 % noise."""
    rng = np.random.default_rng(seed)
    sums = {}
    for cell in rng.choice(LOG_SPEED.size, cells, replace=False):
        k, t = divmod(int(cell), len(MODELS))
        x = LOG_SPEED[k, t] + shift * rng.choice([-1, 1]) + rng.normal(0.0, 0.05, 3)
        sums[speed_text(*KINDS[k], MODELS[t])] = (3.0, float(x.sum()), float((x * x).sum()))
    return sums


def rows(sums: dict[str, tuple[float, float, float]]) -> SpeedTable:
    model = SpeedModel()
    model.update(sums)
    return model.rows()


def error(model: SpeedModel) -> float:
    """Mean absolute error of the log slow-down over the whole measured table."""
    return float(np.abs(model.predict(KINDS, MODELS).slowdown - SLOWDOWN).mean())


def test_a_reading_becomes_a_log_speed_under_its_cell() -> None:
    assert sample(reading()) == (speed_text("LM", 1, "v100"), pytest.approx(2.0))
    assert sample(reading(gpus=0)) == (speed_text("LM", 1, "v100"), pytest.approx(2.0))
    beside = sample(reading(neighbours=["ResNet"]))
    assert beside == (beside_text("LM", "ResNet", "v100"), pytest.approx(2.0))


@pytest.mark.parametrize(
    "values",
    [
        {"steps_per_second": 0.0},
        {"steps_per_second": math.inf},
        {"job_type": ""},
        {"gpu_model": ""},
        {"neighbours": ["a", "b"]},
    ],
    ids=lambda values: str(values),
)
def test_a_reading_that_says_nothing_of_a_cell_is_left_out(values: dict[str, object]) -> None:
    assert sample(reading(**values)) is None


def test_data_sheets_order_models_before_anything_was_seen() -> None:
    slowdown = SpeedModel().predict(KINDS, MODELS).slowdown
    assert (slowdown[:, MODELS.index("v100")] == 0.0).all()
    assert (slowdown[:, MODELS.index("k80")] > slowdown[:, MODELS.index("p100")]).all()
    assert error(SpeedModel()) < 0.45


def test_the_measured_order_is_recovered_from_half_of_the_cells() -> None:
    model = SpeedModel()
    model.update(observe(1, 120))
    predicted = model.predict(KINDS, MODELS).slowdown
    # In all pairs of models that differ by more than 15 % for a kind, which one is faster?
    right = total = 0
    for a in range(3):
        for b in range(a):
            gap = SLOWDOWN[:, a] - SLOWDOWN[:, b]
            clear = np.abs(gap) > 0.15
            total += clear.sum()
            right += (
                np.sign((predicted[:, a] - predicted[:, b])[clear]) == np.sign(gap[clear])
            ).sum()
    assert right / total > 0.95
    assert error(model) < 0.2 < error(SpeedModel())


def test_a_job_type_that_gains_little_from_one_fast_model_gains_little_from_all() -> None:
    """Each job type's slow-down on a model is told from its speeds on the other two."""

    def left_out(prior: SpeedPrior) -> float:
        square, singles = 0.0, [kind for kind in KINDS if kind[1] == 1]
        for t in range(len(MODELS)):
            for kind in singles:
                learned, sums = SpeedModel(prior), {}
                for k, other in enumerate(KINDS):
                    for u, at in enumerate(MODELS):
                        if other[1] == 1 and not (other == kind and u == t):
                            x = float(LOG_SPEED[k, u])
                            sums[speed_text(*other, at)] = (1.0, x, x * x)
                learned.update(sums)
                found = learned.predict(singles, MODELS).log_speed[singles.index(kind)]
                true = LOG_SPEED[KINDS.index(kind)]
                missed = (found - true) - np.delete(found - true, t).mean()
                square += float(missed[t] ** 2)
        return math.sqrt(square / (len(MODELS) * len(singles)))

    alike = SpeedPrior(response=0.0, job_on_model=0.35)
    assert left_out(SpeedPrior()) < 0.8 * left_out(alike)


def test_all_cells_seen_gives_the_table_back() -> None:
    model = SpeedModel()
    model.update(observe(2, LOG_SPEED.size))
    predicted = model.predict(KINDS, MODELS)
    assert np.abs(predicted.log_speed - LOG_SPEED).max() < 0.35
    assert error(model) < 0.05


def test_a_newcomer_gains_much_from_peers() -> None:
    alone, federated = SpeedModel(), SpeedModel()
    few = observe(3, 6)
    alone.update(few)
    federated.update(few)
    total: SpeedTable = {}
    for seed in range(10, 19):
        total = add(total, rows(observe(seed, 80)))
    federated.absorb(Peers(9, total, {}))
    assert error(federated) < 0.35 * error(alone)


@pytest.mark.parametrize(
    ("shift", "harm"), [(1.0, 0.08), (3.0, 0.13)], ids=["clipped by the hub", "not clipped"]
)
def test_one_lying_peer_of_eight_does_little_harm(shift: float, harm: float) -> None:
    honest: SpeedTable = {}
    for seed in range(20, 27):
        honest = add(honest, rows(observe(seed, 160)))
    alone, good, lied_to = SpeedModel(), SpeedModel(), SpeedModel()
    for model in (alone, good, lied_to):
        model.update(observe(3, 20))
    good.absorb(Peers(7, honest, {}))
    lied_to.absorb(Peers(8, add(honest, rows(observe(27, 160, shift=shift))), {}))
    assert error(lied_to) < error(good) + harm < error(alone)


def test_own_readings_outweigh_what_peers_claim() -> None:
    kind, models = [("LM", 1)], ["k80", "v100"]
    model = SpeedModel()
    model.update(
        {
            speed_text("LM", 1, "k80"): (30.0, 30.0, 30.0),
            speed_text("LM", 1, "v100"): (30.0, 60.0, 120.0),
        }
    )
    lie = {speed_key(speed_text("LM", 1, "k80")): SpeedRow(1e6, 4e6, 16e6)}
    model.absorb(Peers(8, lie, {}))
    assert model.predict(kind, models).slowdown[0].tolist() == pytest.approx([1.0, 0.0], abs=0.1)


def test_what_nobody_confirms_is_believed_where_it_is_slower_than_thought() -> None:
    kinds, models = [("LM", 1), ("stranger", 1)], ["k80", "v100"]

    def table(**log_speeds: float) -> SpeedTable:
        return {
            speed_key(speed_text(job, 1, model)): SpeedRow(9.0, 9.0 * x, 9.0 * x * x)
            for name, x in log_speeds.items()
            for job, model in [name.split("_")]
        }

    def slower(confirmed: SpeedTable, **unconfirmed: float) -> list[list[float]]:
        model = SpeedModel()
        model.absorb(Peers(9, confirmed, table(**unconfirmed)))
        return model.predict(kinds, models).slowdown.tolist()

    known = table(LM_v100=2.0)
    thought = slower(known)
    assert slower(known, LM_k80=2.0 - thought[0][0] - 0.4)[0][0] > thought[0][0] + 0.2
    assert slower(known, LM_k80=2.5) == thought  # it would be faster than is thought
    assert slower({}, LM_k80=-5.0) == slower({})  # there is nothing to compare it with
    assert slower(known, stranger_k80=-5.0) == thought


def test_few_peers_weigh_less_than_many() -> None:
    kind, models = [("LM", 1)], ["k80", "v100"]

    def shift(members: int) -> float:
        model = SpeedModel()
        claim = {
            speed_key(speed_text("LM", 1, m)): SpeedRow(10.0, 10 * x, 10 * x * x)
            for m, x in zip(models, (1.0, 2.2), strict=True)
        }
        model.absorb(Peers(members, claim, {}))
        return abs(float(model.predict(kind, models).slowdown[0, 0]) - 1.2)

    assert (
        shift(4)
        < shift(2)
        < shift(1)
        < abs(SpeedModel().predict(kind, models).slowdown[0, 0] - 1.2)
    )
    assert shift(4) == pytest.approx(shift(40))


def test_a_gang_learns_from_single_gpus_of_its_job_type() -> None:
    model = SpeedModel()
    before = model.predict([("X", 1), ("X", 8)], ["k80", "v100"]).slowdown[1, 0]
    model.update(
        {speed_text("X", 1, "k80"): (9.0, 0.0, 0.0), speed_text("X", 1, "v100"): (9.0, 27.0, 81.0)}
    )
    after = model.predict([("X", 1), ("X", 8)], ["k80", "v100"]).slowdown[1, 0]
    assert before + 0.2 < after < 3.0


def test_interference_is_learned_against_the_speed_alone() -> None:
    model = SpeedModel()
    prior = model.predict([("a", 1), ("b", 1)], ["v100"]).interference
    assert prior == pytest.approx(np.full((2, 2), 0.55))
    # Alone log 3; beside b log 2: slowed down by 1.
    model.update(
        {
            speed_text("a", 1, "v100"): (50.0, 150.0, 450.0),
            beside_text("a", "b", "v100"): (50.0, 100.0, 200.0),
        }
    )
    learned = model.predict([("a", 1), ("b", 1)], ["v100"]).interference
    assert learned[0, 1] == pytest.approx(1.0, abs=0.1)
    assert 0.55 < learned[0, 0] < learned[0, 1]  # a seems to suffer more than most
    assert learned[1, 0] == pytest.approx(0.55, abs=0.25)


def test_work_without_gpus_runs_alike_everywhere() -> None:
    assert (SpeedModel().predict([("web", 0)], MODELS).slowdown == 0.0).all()


def test_rows_are_hashed_absolute_and_acceptable_to_the_hub() -> None:
    table = rows(observe(5, 30))
    check_rows(table)
    assert len(table) == 30
    assert rows(observe(5, 30)) == table


def test_the_file_covers_known_and_unknown_kinds() -> None:
    model = SpeedModel()
    model.update(observe(1, 80))
    speeds = model.file(KINDS[:5], MODELS)
    check(speeds)
    assert [(k.job_type, k.gpus) for k in speeds.kinds] == KINDS[:5]
    assert speeds.job_types == list(dict.fromkeys(j for j, _ in KINDS[:5]))
    assert speeds.prior[MODELS.index("v100")] == 0.0
    assert speeds.prior[MODELS.index("k80")] > 0.5
    assert 0.3 < speeds.prior_interference < 0.8


def test_a_cluster_without_gpus_gets_an_empty_table() -> None:
    speeds = SpeedModel().file([("web", 0)], [])
    check(speeds)
    assert speeds.kinds[0].slowdown == []
