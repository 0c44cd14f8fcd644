"""torchtune's real recipe for full fine-tuning, by the script of docs/integrations/with-torchtune.md, on one CPU rank.

python on_torchtune_recipe.py FOLDER [resume_from_checkpoint=True]
"""

import os
import re
import socket
import sys
import warnings
from pathlib import Path

from tests.helpers.missing_packages import stand_in_for

stand_in_for("datasets", "torchao", "torchvision", "sentencepiece", "tiktoken", "blobfile", "PIL", "kagglehub")
stand_in_for("tokenizers", "tyro")
warnings.simplefilter("ignore")

import torch  # noqa: E402
import torchtune  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torchtune import training  # noqa: E402
from torchtune.models.convert_weights import tune_to_hf  # noqa: E402
from torchtune.models.llama3_2 import llama3_2  # noqa: E402

PAGE = Path(__file__).parents[3] / "docs/integrations/with-torchtune.md"
SIZES = {"vocab_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 32}
CONFIG = """
output_dir: {folder}/out
tokenizer: {{_component_: on_torchtune_recipe.Tokenizer}}
dataset: {{_component_: on_torchtune_recipe.Rows}}
seed: 7
shuffle: True
model: {{_component_: torchtune.models.llama3_2.llama3_2, intermediate_dim: 64, {sizes}}}
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: {folder}/base
  checkpoint_files: [model.safetensors]
  recipe_checkpoint: null
  output_dir: {folder}/out
  model_type: LLAMA3_2
resume_from_checkpoint: False
enable_async_checkpointing: True
batch_size: 2
epochs: 3
max_steps_per_epoch: null
gradient_accumulation_steps: 1
optimizer: {{_component_: torch.optim.AdamW, lr: 1e-2}}
loss: {{_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}}
device: cpu
dtype: fp32
compile: False
metric_logger: {{_component_: torchtune.training.metric_logging.DiskLogger, log_dir: {folder}/out/logs}}
"""


class Tokenizer:
    """The padding, which is all that the recipe asks for."""

    pad_id = 0


class Rows(torch.utils.data.Dataset):
    """Random tokens."""

    def __init__(self, tokenizer):
        self.rows = torch.randint(1, 64, (16, 12), generator=torch.Generator().manual_seed(0)).tolist()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"tokens": self.rows[index], "labels": self.rows[index]}


def allow_cpu():
    """Replace what the recipe asks of an accelerator."""
    training.get_distributed_backend = lambda *_, **__: "gloo"
    training.get_memory_stats = lambda *_, **__: {}
    training.log_memory_stats = lambda *_: None
    training.cleanup_before_training = lambda: None


def write_base(folder):
    """Write the model that is fine-tuned, in Hugging Face's format."""
    torch.manual_seed(0)
    state = llama3_2(**SIZES, intermediate_dim=64).state_dict()
    folder.mkdir()
    (folder / "config.json").write_text('{"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}')
    converted = tune_to_hf(state, num_heads=4, num_kv_heads=2, dim=32)
    save_file({name: each.contiguous() for name, each in converted.items()}, folder / "model.safetensors")


def main(folder, *changes):
    folder = Path(folder)
    if not (folder / "base").exists():
        write_base(folder / "base")
        sizes = ", ".join(f"{name}: {value}" for name, value in SIZES.items())
        (folder / "tiny.yaml").write_text(CONFIG.format(folder=folder, sizes=sizes))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_PORT": str(free.getsockname()[1]), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    allow_cpu()
    sys.path.append(str(Path(torchtune.__file__).parents[1] / "recipes"))
    script = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)[-1]
    sys.argv = ["finetune.py", "--config", str(folder / "tiny.yaml"), *changes]
    exec(compile(script, "finetune.py", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main(*sys.argv[1:])
