"""lm-eval through the engine: the same numbers as lm-eval's own `hf` model on the same weights, without a network."""

import json
import socket
from pathlib import Path

import lm_eval
import pytest
import torch
from hydra import compose, initialize_config_dir
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from dualdecoder.checkpoints import resolve
from dualdecoder.engine import Engine
from dualdecoder.errors import CapacityError, ConfigError
from experiments import lm_eval as experiment
from experiments.harness import workload
from experiments.harness.kept_answers import KeptAnswers
from experiments.harness.rows import row_problem
from experiments.lm_eval_model import DualDecoderLM
from experiments.ruler_tasks import OFFLINE_TASKS, TASKS
from experiments.ruler_tasks.for_lm_eval import build, process_results

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "lm_eval"


@pytest.fixture(autouse=True)
def offline(monkeypatch) -> None:
    """Any attempt to reach the network fails the test; data files are named from the root."""

    def refuse(*arguments: object) -> None:
        raise AssertionError(f"network access: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def hf() -> HFLM:
    folder = str(resolve("smollm2"))
    return HFLM(pretrained=folder, tokenizer=folder, dtype="float32", device="cpu", batch_size=4)


@pytest.fixture
def full(smollm2: Engine) -> DualDecoderLM:
    return DualDecoderLM(engine=smollm2, batch_size=4)


def dual(smollm2: Engine, **options: int) -> DualDecoderLM:
    return DualDecoderLM(engine=smollm2.with_method("dualdecoder", **options), batch_size=3)


def evaluate(model: object, *tasks: str, **settings: object) -> dict:
    manager = TaskManager(include_path=str(DATA), include_defaults=False)
    return lm_eval.simple_evaluate(model=model, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **settings)


def likelihoods(results: dict) -> torch.Tensor:
    samples = sorted(results["samples"]["everyday"], key=lambda sample: sample["doc_id"])
    return torch.tensor([[value for value, _ in sample["filtered_resps"]] for sample in samples])


def test_a_standard_task_gives_the_same_as_hf(full: DualDecoderLM, hf: HFLM) -> None:
    ours, theirs = (evaluate(model, "everyday", "everyday_text") for model in (full, hf))
    assert likelihoods(ours).shape == (12, 4)
    torch.testing.assert_close(likelihoods(ours), likelihoods(theirs), atol=1e-3, rtol=0)
    for metric in ("acc,none", "acc_norm,none"):
        assert ours["results"]["everyday"][metric] == theirs["results"]["everyday"][metric]
    assert 0.25 < ours["results"]["everyday"]["acc,none"] < 1, "a task on which the model can be wrong"
    perplexity = [found["results"]["everyday_text"]["word_perplexity,none"] for found in (ours, theirs)]
    assert perplexity[0] == pytest.approx(perplexity[1], rel=1e-3)


def test_a_covering_budget_scores_as_full_kv_does_and_a_small_one_does_not(
    full: DualDecoderLM, smollm2: Engine
) -> None:
    context = "The following list is long. " + "One, two, three and four. " * 30
    requests = [request("loglikelihood", context, more) for more in (" One, two, three", " Nothing of it", " and")]
    expected = torch.tensor([value for value, _ in full.loglikelihood(requests)])
    covering, small = (
        torch.tensor([value for value, _ in model.loglikelihood(requests)])
        for model in (dual(smollm2, budget=1024), dual(smollm2, budget=8))
    )
    torch.testing.assert_close(covering, expected, atol=1e-3, rtol=0)
    assert (small - expected).abs().max() > 0.01


def request(kind: str, *arguments: object) -> Instance:
    return Instance(kind, {}, tuple(arguments), 0)


@pytest.mark.parametrize("method", ["full_kv", "dualdecoder"])
def test_greedy_flags_and_order(smollm2: Engine, method: str) -> None:
    engine = smollm2.with_method(method)
    model = DualDecoderLM(engine=engine, batch_size=2)
    context = "Once upon a time"
    [completion] = engine.generate([context], 5)
    answers = [completion.text, " purple", completion.text]
    found = model.loglikelihood([request("loglikelihood", context, answer) for answer in answers])
    assert [greedy for _, greedy in found] == [True, False, True]
    assert found[0] == found[2] and found[0][0] > found[1][0]


def test_generation_equals_hf_with_stops_and_chat_template(full: DualDecoderLM, hf: HFLM) -> None:
    chat = [{"role": "user", "content": "Name three colours."}]
    assert full.apply_chat_template(chat) == hf.apply_chat_template(chat)
    opened = [*chat, {"role": "assistant", "content": "Three colours are"}]
    assert full.apply_chat_template(opened, False).endswith("assistant\nThree colours are")
    options = {"until": ["."], "max_gen_toks": 24, "do_sample": False}
    texts = [full.apply_chat_template(chat), "The capital of France is", full.apply_chat_template(opened, False)]
    requests = [request("generate_until", text, dict(options)) for text in texts]
    ours = full.generate_until(requests)
    assert ours == hf.generate_until(requests)
    assert not any("." in text for text in ours)
    long, short = (full.generate_until([request("generate_until", texts[0], {"max_gen_toks": n})])[0] for n in (9, 3))
    assert long.startswith(short) and len(long) > len(short)


def test_an_unknown_generation_option_and_a_context_too_long_are_clear(full: DualDecoderLM, smollm2: Engine) -> None:
    with pytest.raises(ConfigError, match=r"gen_kwargs\.num_beams is not known; allowed: until, max_gen_toks"):
        full.generate_until([request("generate_until", "Hello", {"num_beams": 2})])
    long = "word " * 9000
    with pytest.raises(CapacityError, match="exceed the 8192 of smollm2"):
        full.loglikelihood([request("loglikelihood", long, " more")])
    for model, kind, more in ((full, "generate_until", {}), (dual(smollm2), "loglikelihood", " more")):
        with pytest.raises(CapacityError, match="exceed the context of smollm2"):
            getattr(model, kind)([request(kind, long, more)])


def test_a_tokenizer_without_chat_template_is_a_clear_error(smollm2: Engine, monkeypatch) -> None:
    monkeypatch.setattr(smollm2.tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match="the tokenizer of this model has none; run without it"):
        DualDecoderLM(engine=smollm2).apply_chat_template([{"role": "user", "content": "Hi"}])


def test_rolling_windows_cover_every_token_once(smollm2: Engine, monkeypatch) -> None:
    monkeypatch.setattr(DualDecoderLM, "max_length", 10)
    model = DualDecoderLM(engine=smollm2)
    text = "One two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen."
    windows = model._windows(text)
    assert len(windows) > 1
    assert [token for _, continuation in windows for token in continuation] == model.tok_encode(text)
    assert windows[0][0] == [model.prefix_token_id]
    assert all(context and len(context) + len(continuation) <= 10 for context, continuation in windows)


def test_a_stopped_run_goes_on_after_what_it_has(smollm2: Engine, tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "kept.jsonl"
    requests = [request("loglikelihood", "A cat is", more) for more in (" an animal", " a stone", " a house")]
    expected = DualDecoderLM(engine=smollm2, resume=str(path)).loglikelihood(requests[:2])
    # A process that is killed may leave half a line.
    with path.open("a") as file:
        file.write('["half')
    again = DualDecoderLM(engine=smollm2, resume=str(path))
    asked: list[object] = []
    again._exact_score = lambda context, continuation: asked.append(continuation) or (-1.0, False)
    assert again.loglikelihood(requests) == [*expected, (-1.0, False)]
    assert len(asked) == 1
    other = DualDecoderLM(engine=smollm2.with_method("dualdecoder", budget=64), resume=str(path))
    assert other.kept._key("loglikelihood", 1) != again.kept._key("loglikelihood", 1)


def test_batches_hold_like_requests_of_similar_length() -> None:
    seen: list[list[int]] = []

    def answer(group: list[int]) -> list[int]:
        seen.append(group)
        return [10 * item for item in group]

    found = KeptAnswers(None, "x").answer_all("k", [5, 2, 9, 4, 2], answer, 2, lambda n: (n % 2, -n), lambda n: n % 2)
    assert found == [50, 20, 90, 40, 20]
    assert seen == [[4, 2], [9, 5]]


def test_the_name_is_registered_beside_lm_evals_own() -> None:
    from lm_eval.api.registry import get_model

    assert get_model("dualdecoder") is DualDecoderLM
    assert get_model("hf") is HFLM


def test_by_name_with_arguments() -> None:
    arguments = {"model": "smollm2", "method": "dualdecoder", "budget": 64, "batch_size": 2}
    results = evaluate("dualdecoder", "everyday", model_args=arguments, limit=1)
    assert results["n-samples"]["everyday"]["effective"] == 1
    with pytest.raises(ConfigError, match="option depth of method dualdecoder"):
        evaluate("dualdecoder", "everyday", model_args={"depth": 3}, limit=1)


@pytest.fixture
def loaded(smollm2: Engine, monkeypatch) -> None:
    monkeypatch.setattr(workload, "_loaded", lambda *arguments: smollm2)


def config(*overrides: str):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("lm_eval", list(overrides))


def test_ruler_by_lm_eval_is_ruler(loaded, tmp_path: Path) -> None:
    overrides = ("tasks=[ruler_nv_niah_single_1]", "method=full_kv", "metadata={length: 400, samples: 2}")
    rows = experiment.measure(config(*overrides, f"results_dir={tmp_path}"))
    assert row_problem("lm_eval", rows) is None
    [row] = rows
    assert (row["task"], row["metric"], row["value"], row["samples"]) == (
        "ruler_nv_niah_single_1", "ruler_score", 100, 2,
    )  # fmt: skip
    kept = [json.loads(line) for line in next(tmp_path.rglob("*.jsonl")).read_text().splitlines()]
    assert len(kept) == 2


def test_there_is_a_task_file_for_each_of_the_13_and_a_group_of_the_eleven() -> None:
    manager = TaskManager(include_path=str(experiment.TASKS_FOLDER), include_defaults=False)
    names = {f"ruler_nv_{name}" for name in TASKS}
    assert set(manager.all_tasks) == {*names, "ruler_nv"}
    group = (experiment.TASKS_FOLDER / "ruler_nv.yaml").read_text()
    assert {line.strip("- ") for line in group.splitlines() if line.startswith("  - ruler")} == {
        f"ruler_nv_{name}" for name in OFFLINE_TASKS
    }
    for name, task in TASKS.items():
        text = (experiment.TASKS_FOLDER / f"ruler_nv_{name}.yaml").read_text()
        assert f"ruler_task: {name}\n" in text and f"max_gen_toks: {task.new_tokens}\n" in text


def test_documents_of_the_question_tasks_and_their_score() -> None:
    squad = ROOT / "tests" / "data" / "qa" / "squad.json"
    documents = build("qa_1", model="smollm2", version=1.0, length=800, samples=2, squad=str(squad))["test"]
    assert documents[0]["answers"] == ["1731", "in 1731"] and documents[0]["prompt"].endswith(" Answer:")
    assert process_results(documents[0], ["It was 1731."]) == {"ruler_score": 100}
    assert process_results({"task": "vt", "answers": ["AB", "CD"]}, ["ab"]) == {"ruler_score": 50}
    with pytest.raises(ConfigError, match=r"metadata\.tokenizer is missing"):
        build("vt")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tasks=[nope]"], r"tasks=\['nope'\] is not allowed; allowed: ruler_nv, ruler_nv_cwe"),
        (["tasks=[]"], r"tasks=\[\] is not allowed"),
        (["tasks=[ruler_nv_qa_1]"], "task 'qa_1' has no data"),
        (["batch=0"], "batch=0 is not allowed"),
    ],
)
def test_bad_settings(loaded, tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment.measure(config(*overrides, f"results_dir={tmp_path}"))
