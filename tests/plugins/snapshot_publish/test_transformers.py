"""Versions are folders that transformers loads, with equal logits."""

import pytest
import torch

from snapshot_publish import Publisher, PublishOptions, Subscriber

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.libraries


@pytest.mark.filterwarnings("ignore")
def test_publish_and_pull_versions_are_loaded_by_transformers(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    net = transformers.LlamaForCausalLM(config).eval()
    config.save_pretrained(tmp_path / "config")
    tokens = torch.arange(20).view(1, -1)
    publisher = Publisher(tmp_path / "store", options=PublishOptions(files=tmp_path / "config"))
    publisher.publish(1, net).wait()
    load = transformers.LlamaForCausalLM.from_pretrained
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "store" / "weight_v000001")(tokens).logits, net(tokens).logits)
        subscriber = Subscriber(tmp_path / "store", tmp_path / "local")
        for step in (2, 3):
            subscriber.pull()
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter) * (torch.rand_like(parameter) < 0.02))
            assert publisher.publish(step, net).wait().base == step - 1
            assert torch.equal(load(subscriber.pull())(tokens).logits, net(tokens).logits)
