"""Teacher forcing and the attention mass, against dense recomputation."""

import pytest
import torch
from torch import Tensor

from dualdecoder.engine import Engine
from dualdecoder.method import KVMethod
from dualdecoder.prefill import prefill
from experiments.harness.attention_mass import MassWatch, can_watch
from experiments.harness.teacher import Teacher, forced_logits


def dense_logits(engine: Engine, ids: list[int]) -> Tensor:
    """Logits ``[T, V]`` after every token of a text, by one prefill."""
    with torch.inference_mode():
        return engine.model.logits(prefill(engine.model, ids, lambda *_: None)[None])[0]


@pytest.mark.parametrize(("method", "options"), [("full_kv", {}), ("dualdecoder", {"budget": 256})])
def test_forced_logits_are_those_of_a_dense_prefill(tiny: Engine, random_ids, method: str, options: dict) -> None:
    engine = tiny.with_method(method, **options)
    texts, lengths = [random_ids(90, seed=1), random_ids(70, seed=2)], (81, 66)
    snapshots = [engine.prefill(text[:n]) for text, n in zip(texts, lengths, strict=True)]
    continuations = [text[n:] for text, n in zip(texts, lengths, strict=True)]
    steps = [logits_BV.clone() for logits_BV in forced_logits(engine, snapshots, continuations)]
    assert len(steps) == 9
    for b, (text, n) in enumerate(zip(texts, lengths, strict=True)):
        got = torch.stack([logits_BV[b] for logits_BV in steps[: len(text) - n]])
        torch.testing.assert_close(got, dense_logits(engine, text)[n - 1 : -1], atol=1e-4, rtol=1e-4)


def test_the_teacher_leaves_the_speculated_row_to_the_model() -> None:
    teacher = Teacher([[5, 6, 7, 8], [1, 2]])
    logits_BRV = torch.zeros(2, 2, 10)
    logits_BRV[:, :, 9] = 1
    assert teacher(logits_BRV, torch.tensor([1, 0])).tolist() == [[7, 9], [2, 9]]
    # A text that has ended has nothing more to teach; its tokens are not looked at.
    assert teacher(logits_BRV, torch.tensor([2, 1]))[0].tolist() == [8, 9]


def watched_run(engine: Engine, ids: list[int], prompt: int, see) -> MassWatch:
    snapshot, watches = engine.prefill(ids[:prompt]), []

    def watch(method: KVMethod) -> None:
        watches.append(MassWatch(method, snapshot))
        see(method)

    for _ in forced_logits(engine, [snapshot], [ids[prompt:]], watch):
        pass
    return watches[0]


def test_attention_mass_equals_a_recomputation_token_by_token(tiny: Engine, random_ids) -> None:
    """Small windows, so that generated chunks become selectable within the run."""
    engine = tiny.with_method("dualdecoder", budget=16, local=8, window=24)
    expected: list[float] = []
    keys: dict[int, list[Tensor]] = {}

    def see(method: KVMethod) -> None:
        inner = method.attend

        def attend(layer: int, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor) -> Tensor:
            chunks = int(method.chunks_B[0])
            o_BRHD = inner(layer, q_BRHD, k_BRKD, v_BRKD)
            if q_BRHD.shape[1] == method.rows:
                keys[layer] = [*keys[layer], k_BRKD[0, 0]]
                expected.append(mass(method, layer, q_BRHD[0, 0], chunks))
            return o_BRHD

        method.attend = attend

    def mass(method: KVMethod, layer: int, q_HD: Tensor, chunks: int) -> float:
        shares = []
        for head, q_D in enumerate(q_HD):
            group = head // (len(q_HD) // method.model.kv_heads)
            score = torch.stack([k_KD[group] @ q_D for k_KD in keys[layer]]) * len(q_D) ** -0.5
            kept = {*method.selected[layer][0, group].tolist(), *method.layers[layer].outliers_BKO[0, group].tolist()}
            attended = [p // 8 in kept or p >= chunks * 8 for p in range(len(score))]
            shares.append(float(score.softmax(0)[torch.tensor(attended)].sum()))
        return sum(shares) / len(shares)

    ids = random_ids(150)
    keys.update({layer: list(k_TKD) for layer, (_, _, k_TKD, _) in enumerate(engine.prefill(ids[:100]).layers)})
    watch = watched_run(engine, ids, 100, see)
    assert len(watch.masses) == 49 * engine.model.config.layers
    assert watch.masses == pytest.approx(expected, abs=1e-5)
    assert min(watch.masses) < 0.9


def test_a_covering_budget_captures_everything_and_full_kv_cannot_be_watched(tiny: Engine, random_ids) -> None:
    engine = tiny.with_method("dualdecoder", budget=256)
    assert watched_run(engine, random_ids(90), 80, lambda method: None).masses == pytest.approx([1.0] * 36)
    assert not can_watch(tiny.start([random_ids(9)], 2).method)
