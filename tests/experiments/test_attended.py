"""The share of the true set that a method attends to: against counts by hand, and over all methods."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.infinigen import InfiniGen, InfiniGenConfig
from dualdecoder.buffers import ChunkBuffer
from dualdecoder.config import ModelConfig
from dualdecoder.engine import Engine
from dualdecoder.landmarks import NO_CHUNK
from dualdecoder.method import KVMethod, method_class, method_config
from dualdecoder.selection_replay import ReplayConfig, replay_selection
from dualdecoder.shapes import SHAPES
from experiments import method_time
from experiments.harness.attended import EQUAL_WORK, OBSERVED_STEPS, attended_share, is_equal_work
from experiments.harness.gpu import LinkRate
from experiments.harness.steps import model_of, time_steps

CONF = Path(__file__).resolve().parents[2] / "conf"
SMALL = ("model=tiny", "context=1024", "batch=2", "budget=128", "warmup=1", "steps=6")


def row_of(*overrides: str) -> dict:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("method_time", [*SMALL, *overrides])
    return method_time.measure_on(cfg, "cpu", 1e9, LinkRate(1e8, "made up"))


@pytest.mark.parametrize("name", ["dualdecoder", "shadowkv", "quest", "oasiskv_no_cap"])
def test_methods_that_attend_to_all_of_a_seeded_set(name: str) -> None:
    row = row_of(f"method={name}")
    assert (row["method"], row["attended_share"]) == (name, 1.0)
    assert row["attended_share_basis"].endswith(f"units in {OBSERVED_STEPS} untimed steps")


def test_a_cap_that_starves_the_resident_set_shows_beside_the_speed() -> None:
    """11 blocks of which one is replaced a step, where 4 are new in each."""
    row = row_of("method=oasiskv")
    assert 0 < row["attended_share"] < 0.6 and not is_equal_work(row["attended_share"])
    assert row["remark"].startswith("at most 1 of 10 resident blocks are replaced a step")


def test_without_a_cap_oasiskv_attends_to_what_was_predicted() -> None:
    """9 of its 10 blocks are foreseen; nothing fetches the tenth."""
    row = row_of("method=oasiskv", "+method.options.fetch_ratio=1.0")
    assert row["attended_share"] == 0.9 and not is_equal_work(row["attended_share"])


@pytest.mark.parametrize("name", ["full_kv", "full_offload", "specache"])
def test_dense_methods_attend_to_everything_without_an_observed_step(name: str, monkeypatch) -> None:
    monkeypatch.setattr("experiments.harness.attended.OBSERVED_STEPS", None)
    row = row_of(f"method={name}")
    assert row["attended_share"] == 1.0 and row["attended_share_basis"].startswith("attends to every token")
    assert ("not to all of them exactly" in row["attended_share_basis"]) == (name == "specache")


@pytest.mark.parametrize("name", ["h2o", "streaming_llm"])
def test_of_evicted_tokens_no_share_is_known(name: str) -> None:
    row = row_of(f"method={name}")
    assert row["attended_share"] is None and row["attended_share_basis"] == "unknown: evicted tokens have no scores"
    assert not is_equal_work(row["attended_share"])


def seen_by_attention(method: KVMethod) -> tuple[list[set], list[set]]:
    """True and walked sets as (sequence, head, block), from outside: the replay's answers and attention's lists."""
    true, walked = [], []
    rewrite, attend = method.rewrite, method.ops.attend

    def listing(table_BKS: torch.Tensor) -> set:
        return {(b, k, n) for b, row in enumerate(table_BKS.tolist()) for k, head in enumerate(row) for n in head}

    def asked(*arguments):
        sets = rewrite(*arguments)
        true.append(listing(sets[0]))
        return sets

    def attending(q, k, v, listed, *rest):
        walked.append(listing(listed.number_BKS))
        return attend(q, k, v, listed, *rest)

    method.rewrite, method.ops.attend = asked, attending
    return true, walked


@pytest.mark.parametrize("ratio", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("accuracy", [0.5, 1.0])
def test_the_share_of_oasiskv_is_that_of_the_blocks_attention_walks(ratio: float, accuracy: float) -> None:
    model = model_of("random:tiny", "float32", "cpu")
    config = method_config("oasiskv", {"budget": 256, "fetch_ratio": ratio})
    method = method_class("oasiskv")(model.config, config, batch=2, context=2048, dtype=torch.float32)
    method.fill_synthetic(1900)
    replay_selection(method, ReplayConfig(accuracy=accuracy))
    true, walked = seen_by_attention(method)
    share = time_steps(model, method, 1, 4).attended.share
    last = OBSERVED_STEPS * model.config.layers
    pairs = list(zip(true[-last:], walked[-last:], strict=True))
    assert share == sum(len(t & w) for t, w in pairs) / sum(len(t) for t, _ in pairs)


def test_a_chunk_counts_only_if_its_slot_holds_it_or_it_is_read_in_place() -> None:
    buffer = ChunkBuffer(torch.zeros(1, 1, 4, 2, 8, 1), torch.tensor([[[5, 7, NO_CHUNK, 2]]]))
    chosen, slots = torch.tensor([[[7, 5, 9, 2, 4, NO_CHUNK]]]), torch.tensor([[[1, 0, 2, 0, -1, 0]]])
    assert buffer.present(chosen, slots).tolist() == [[[7, 5, NO_CHUNK, NO_CHUNK, 4, NO_CHUNK]]]


def best_tokens(q_GD, keys_TD, alpha: float) -> list[int]:
    logits = keys_TD @ q_GD.T / q_GD.shape[1] ** 0.5
    score = (logits - logits.amax(dim=0)).amax(dim=1)
    return [int(t) for t in score.argsort(descending=True, stable=True) if score[t] > -alpha]


@pytest.mark.parametrize("sign", [1, -1])
def test_infinigen_is_asked_for_what_the_true_query_chooses(sign: int) -> None:
    """All columns are kept, so that scores are those of the keys; one KV head, so that n is that head's own count."""
    shape = ModelConfig("one-head", 3, 8, 8, 2, 1, 16, 16, 4096)
    method = InfiniGen(
        shape, InfiniGenConfig(alpha=1.0, ratio=1.0, cap=40, dense_layers=1), batch=2, context=64, dtype=torch.float32
    )
    torch.manual_seed(0)
    prompts = [[torch.randn(50, heads, 16) for heads in (2, 1, 1)] for _ in range(2)]
    for sequence, (q, k, v) in enumerate(prompts):
        for layer in range(3):
            method.prefill_layer(sequence, layer, q, k, k, v)
    seen = []
    method.observe = lambda layer, true, at_hand: seen.append((layer, true.clone(), at_hand.clone()))
    method.begin_step(1, torch.tensor([True, True]))
    q_BRHD, own = torch.randn(2, 1, 2, 16), torch.randn(2, 1, 1, 16)
    for layer in range(3):
        if layer < 2:
            method.foresee(layer + 1, sign * q_BRHD)
        method.attend(layer, q_BRHD, own, own)
    assert [layer for layer, _, _ in seen] == [1, 2]
    for b, (_, keys, _) in enumerate(prompts):
        wanted, guessed = (best_tokens(way * q_BRHD[b, 0], keys[:, 0], 1.0) for way in (1, sign))
        for _, true, at_hand in seen:
            assert [n for n in true[b, 0].tolist() if n != NO_CHUNK] == wanted
            assert [n for n in at_hand[b, 0].tolist() if n != NO_CHUNK] == guessed


@pytest.mark.parametrize("name", ["dualdecoder", "shadowkv", "quest", "oasiskv", "infinigen"])
def test_real_selections_are_measured_too_and_observing_changes_no_result(name: str, tiny: Engine, random_ids) -> None:
    option = {"cap": 48} if name == "infinigen" else {"budget": 64}
    prompts = [random_ids(400, 1), random_ids(333, 2)]
    plain, observed = (tiny.with_method(name, **option).start(prompts, 2 + OBSERVED_STEPS + 1) for _ in range(2))
    expected = [step.logits_BV for step in plain.steps]
    got = [next(observed.steps).logits_BV for _ in range(2)]
    share = attended_share(observed.method, lambda: got.append(next(observed.steps).logits_BV))
    assert torch.equal(torch.stack(got), torch.stack(expected))
    assert observed.method.observe is None
    assert (share.share == 1) == (name in ("dualdecoder", "shadowkv", "quest")) and 0 < share.share <= 1


def test_an_error_in_an_observed_step_leaves_no_observer_behind() -> None:
    method = method_class("quest")(SHAPES["tiny"], method_config("quest", {}), batch=1, context=64, dtype=torch.float32)

    def fail() -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        attended_share(method, fail)
    assert method.observe is None


def test_what_is_not_said_or_not_transferred_is_unknown() -> None:
    method = method_class("quest")(SHAPES["tiny"], method_config("quest", {}), batch=1, context=64, dtype=torch.float32)
    assert attended_share(method, lambda: None).basis == "unknown: the method does not say what it attends to"
    method.transfers = False
    share = attended_share(method, lambda: None)
    assert (share.share, share.basis) == (None, "unknown: nothing was transferred")


@settings(max_examples=40)
@given(st.data())
def test_units_are_counted_over_calls_sequences_and_heads(data: st.DataObject) -> None:
    method = method_class("quest")(SHAPES["tiny"], method_config("quest", {}), batch=1, context=32, dtype=torch.float32)
    sets = st.lists(st.integers(0, 31), unique=True, max_size=6)
    calls = [[(data.draw(sets), data.draw(sets)) for _ in range(4)] for _ in range(OBSERVED_STEPS)]

    def table(lists: list[list[int]]) -> torch.Tensor:
        return torch.tensor([one + [NO_CHUNK] * (6 - len(one)) for one in lists]).view(2, 2, 6)

    given_calls = iter(calls)

    def step() -> None:
        pairs = next(given_calls)
        method.observe(0, table([true for true, _ in pairs]), table([have for _, have in pairs]))

    pairs = [pair for call in calls for pair in call]
    wanted = sum(len(true) for true, _ in pairs)
    share = attended_share(method, step).share
    assert share == (sum(len({*true} & {*have}) for true, have in pairs) / wanted if wanted else 1.0)


def test_the_mark() -> None:
    assert [is_equal_work(share) for share in (None, 0.0, EQUAL_WORK - 1e-9, EQUAL_WORK, 1.0)] == [
        False, False, False, True, True,
    ]  # fmt: skip
