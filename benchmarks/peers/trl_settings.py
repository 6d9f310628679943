"""How TRL's trainer is set up on both of its sides: on a CPU, in the weights' own type, saying and saving nothing."""

PLAIN = {
    "use_cpu": True,
    "bf16": False,  # the weights have the type already: nothing is left to autocast
    "beta": 0.0,
    "gradient_checkpointing": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}
