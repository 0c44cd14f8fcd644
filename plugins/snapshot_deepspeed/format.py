"""How DeepSpeed's folders are recognised: for the library's detection of formats."""

from snapshot.formats.registry import Format

RUN = Format("deepspeed_run", 40, "snapshot_deepspeed.folders:describe_run", "latest|latest_universal")
TAG = Format(
    "deepspeed", 55, "snapshot_deepspeed.folders:describe_tag", r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt"
)
UNIVERSAL = Format("deepspeed-universal", writes="deepspeed-universal", plan="snapshot_deepspeed.export:plan")
