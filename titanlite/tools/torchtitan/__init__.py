"""Verifies, debugs, plans and imports jobs of TorchTitan 0.3: `titanlite verify torchtitan:NAME`.

    command.py     the commands, and what they print
    options.py     its options; all others are TorchTitan's own
    job.py         a configuration by name, the plan that the ranks run, and its reference
    debug.py       trains the job with a debugger in one rank
    plan.py        traces a step of it in the planner's fake world
    to_toml.py     a configuration as titanlite's TOML
    verify.py      composes a comparison of tools/verify/program
    trainer.py     on a rank: TorchTitan's Trainer, whose step is measured
    stand_ins.py   the one place that changes TorchTitan from outside, and what each change hides
    kernels.py     attention and grouped products in full
    muon.py        its distributed Muon on whole tensors

Only options.py and command.py import no torch.
"""
