"""Ask DeepSpeed for the memory of the device that it sees, as ZeRO does."""

from __future__ import annotations

from dstrial.doctor.training.programs.program import Program


def main() -> None:
    """Ask after ``dstrial.init`` has prepared what there is to prepare."""
    program = Program()
    import dstrial

    with dstrial.init(hparams={}, exp_conf={"name": "doctor"}, enable_tensorboard_logging=False) as context:
        from deepspeed.accelerator import get_accelerator

        available = int(get_accelerator().available_memory())
        program.note(available_gib=round(available / 2**30, 2), device=str(context.device))


if __name__ == "__main__":
    main()
