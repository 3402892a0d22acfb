"""RULER, fidelity and lm-eval on a GPU give what they give on the CPU, in fp32."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from lm_eval.api.instance import Instance

from dualdecoder.engine import Engine
from dualdecoder.method import method_config
from experiments import ruler
from experiments.harness import workload
from experiments.harness.attention_mass import can_watch
from experiments.harness.teacher import forced_logits
from experiments.lm_eval_model import DualDecoderLM

pytestmark = pytest.mark.gpu
CONF = Path(__file__).resolve().parents[2] / "conf"
OPTIONS = {"budget": 128}


@pytest.fixture(scope="module")
def engines(smollm2: Engine) -> list[Engine]:
    """The same fp32 engine on the CPU and on the GPU."""
    config = method_config("dualdecoder", OPTIONS)
    models = (smollm2.model, smollm2.model.to("cuda", torch.float32))
    return [Engine(model, smollm2.tokenizer, "dualdecoder", config) for model in models]


def test_forced_logits_equal_the_cpus_also_from_a_graph(engines: list[Engine], manual) -> None:
    """Each is looked at before the next is asked for, as a graph writes all of them to one place."""
    ids = manual(1040)
    found = []
    for engine in engines:
        snapshots = [engine.prefill(ids[:1000]), engine.prefill(ids[:500])]
        steps = forced_logits(engine, snapshots, [ids[1000:], ids[500:510]])
        found.append(torch.stack([logits_BV[0].log_softmax(-1).cpu() for logits_BV in steps]))
    cpu, gpu = found
    assert cpu.shape[0] == 40
    torch.testing.assert_close(gpu, cpu, atol=2e-3, rtol=2e-3)


def test_snapshots_stay_on_the_gpu_and_a_method_there_is_not_watched(engines: list[Engine], manual) -> None:
    snapshot = engines[1].prefill(manual(300))
    assert all(tensor.is_cuda for layer in snapshot.layers for tensor in layer)
    assert not can_watch(engines[1].resume([snapshot], 2).method)


def test_ruler_answers_equal_the_cpus(engines: list[Engine], monkeypatch) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("ruler", ["task=niah_single_2", "length=700", "samples=3", "methods=[dualdecoder]", "budget=128"])
    answers = []
    for engine in engines:
        monkeypatch.setattr(workload, "_loaded", lambda *arguments, engine=engine: engine)
        answers.append(ruler.measure(cfg)[0]["answers"])
    assert answers[0] == answers[1]


def test_log_likelihoods_equal_the_cpus(engines: list[Engine], manual) -> None:
    # No text that repeats itself: its chunks score alike, and rounding would decide which are selected.
    context = engines[0].text(manual(500))
    requests = [Instance("loglikelihood", {}, (context, more), 0) for more in (" One, two", " Nothing of it", " and")]
    cpu, gpu = (DualDecoderLM(engine=engine, batch_size=2).loglikelihood(requests) for engine in engines)
    assert [value for value, _ in gpu] == pytest.approx([value for value, _ in cpu], abs=1e-2)
    assert [greedy for _, greedy in gpu] == [greedy for _, greedy in cpu]
