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
from dualdecoder.errors import ConfigError
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_gen_toks": "many"}, "is not allowed .*; allowed: numbers as numbers"),
        ({"temperature": "hot"}, "is not allowed .*; allowed: numbers as numbers"),
        ({"max_gen_toks": 0}, r"gen_kwargs\.max_gen_toks=0 is not allowed; allowed: from 1 to 8191"),
        ({"until": None}, r"gen_kwargs\.until=\[None\] is not allowed; allowed: a text or a list of texts"),
        ({"until": ["a", 7]}, r"gen_kwargs\.until=\['a', 7\] is not allowed"),
        ({"do_sample": True}, r"gen_kwargs\.temperature=None is not allowed; allowed: above 0 with do_sample"),
        ({"do_sample": "yes"}, r"gen_kwargs\.do_sample='yes' is not allowed; allowed: true or false"),
        (
            {"do_sample": True, "temperature": 1.0, "top_p": "0.5"},
            r"gen_kwargs\.top_p='0\.5' is not allowed; .* a number",
        ),
        (
            {"do_sample": True, "temperature": 1.0, "top_k": 2.5},
            r"gen_kwargs\.top_k=2\.5 is not allowed; .* an integer",
        ),
        ({"do_sample": True, "temperature": 1.0, "seed": True}, r"gen_kwargs\.seed=True is not allowed"),
        ({"do_sample": True, "temperature": 1.0, "top_p": 0}, "top_p=0 is not allowed"),
    ],
)
def test_a_generation_option_of_the_wrong_kind_is_one_line(full: DualDecoderLM, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        full.generate_until([request("generate_until", "Hello", options)])
    assert "\n" not in str(caught.value)


def test_an_empty_context_has_nothing_to_go_on_from(full: DualDecoderLM) -> None:
    with pytest.raises(ConfigError, match="context='' is not allowed; allowed: a text of at least one token"):
        full.generate_until([request("generate_until", "", {"max_gen_toks": 2})])


def test_samples_of_one_request_are_drawn_anew_and_greedy_ones_only_once(full: DualDecoderLM, monkeypatch) -> None:
    asked: list[tuple[str, int]] = []

    def answer(group: list) -> list[str]:
        asked.extend((context, settings.get("seed", 0)) for context, settings in group)
        return [f"{context} {settings.get('seed', 0)}" for context, settings in group]

    monkeypatch.setattr(full, "_generate", answer)
    drawn = {"do_sample": True, "temperature": 1.0, "seed": 5}
    requests = [request("generate_until", text, drawn) for text in ("a", "a", "b", "a")]
    assert full.generate_until(requests) == ["a 5", "a 6", "b 5", "a 7"]
    asked.clear()
    assert full.generate_until([request("generate_until", "a", {}) for _ in range(3)]) == ["a 0"] * 3
    assert asked == [("a", 0)]


def test_a_template_that_refuses_the_system_is_given_the_rest_as_by_hf(
    full: DualDecoderLM, hf: HFLM, monkeypatch
) -> None:
    refusing = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no\nsystem') }}{% endif %}"
        "{% if m.content == 'bad' %}{{ raise_exception('not\nthis') }}{% endif %}[{{ m.content }}]{% endfor %}"
    )
    for tokenizer in (full.tokenizer, hf.tokenizer):
        monkeypatch.setattr(tokenizer, "chat_template", refusing)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert full.apply_chat_template(chat) == hf.apply_chat_template(chat) == "[Hi]"
    for refused in ([{"role": "user", "content": "bad"}], [chat[0], {"role": "user", "content": "bad"}]):
        with pytest.raises(
            ConfigError, match=r"^chat: the model's chat template refuses the message: [^\n]*not[^\n]*$"
        ):
            full.apply_chat_template(refused)


def test_an_unknown_generation_option_is_clear(full: DualDecoderLM) -> None:
    with pytest.raises(ConfigError, match=r"gen_kwargs\.num_beams is not known; allowed: until, max_gen_toks"):
        full.generate_until([request("generate_until", "Hello", {"num_beams": 2})])


def test_a_tokenizer_without_chat_template_is_a_clear_error(smollm2: Engine, monkeypatch) -> None:
    monkeypatch.setattr(smollm2.tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match="the tokenizer of this model has no chat template"):
        DualDecoderLM(engine=smollm2).apply_chat_template([{"role": "user", "content": "Hi"}])


def test_rolling_windows_cover_every_token_once(smollm2: Engine, monkeypatch) -> None:
    monkeypatch.setattr(DualDecoderLM, "max_length", 10)
    model = DualDecoderLM(engine=smollm2)
    text = "One two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen."
    windows = model._windows(text)
    assert len(windows) > 1
    assert [token for _, continuation in windows for token in continuation] == model.tok_encode(text)
    assert windows[0][0] == [model.prefix_token_id]
    assert all(context and len(context) + len(continuation) <= 11 for context, continuation in windows)


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
    ("name", "value"),
    [
        ("length", "long"),
        ("length", 1024.5),
        ("length", True),
        ("samples", 0),
        ("samples", "8"),
        ("samples", 2.0),
        ("seed", None),
        ("essays", 7),
        ("squad", ["a"]),
    ],
)
def test_metadata_of_the_wrong_kind_is_one_line(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^metadata\.{name}=.* is not allowed; allowed: [^\n]*$"):
        build("vt", model="smollm2", **{name: value})


def test_a_length_may_be_written_in_thousands() -> None:
    [document] = build("niah_single_1", model="smollm2", length="1K", samples=1)["test"]
    [same] = build("niah_single_1", model="smollm2", length=1024, samples=1)["test"]
    assert document == same


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
