"""Settings of other systems and the one that does the same here, for errors and `settings`."""

_RATE, _BATCH, _LENGTH = "optim.learning_rate", "data.lanes", "data.segment_length"
_MEMORY = "model.memory_length, the tokens that a layer attends to before a segment"
_LANES = f"{_BATCH}, of all ranks"
_SLOTS = "engine.micro_batch_lanes; accumulation follows"
_CONTEXT = f"{_LENGTH}, and model.memory_length for what is remembered before it"
_ZERO = "engine.zero_stage: 3 shards all"
_NO_PARTS = "engine.zero_stage; layers are not split"
_STEPS = "optim.steps; 'pretrain describe' says how many tokens they are"
_NOTHING = "nothing: the same command resumes"

# Name, in lower case, without hyphens and underscores -> what to use.
OTHER_NAMES = {
    **dict.fromkeys(("lr", "maxlr", "peaklr", "baselr"), _RATE),
    **dict.fromkeys(("minlr", "lrmin"), "optim.schedule.final_fraction, a part of the rate"),
    **dict.fromkeys(
        ("lrscheduler", "lrschedulertype", "lrdecaystyle", "scheduler"), "optim.schedule.shape"
    ),
    **dict.fromkeys(("warmup", "warmupiters", "lrwarmupiters"), "optim.schedule.warmup_steps"),
    **dict.fromkeys(("batch", "batchsize", "globalbatchsize", "trainbatchsize"), _LANES),
    **dict.fromkeys(("microbatchsize", "perdevicetrainbatchsize", "devicebatchsize"), _SLOTS),
    **dict.fromkeys(("gradientaccumulationsteps", "gradaccum", "accumulation"), _SLOTS),
    **dict.fromkeys(("seqlen", "seqlength", "sequencelength", "tgtlen", "bptt"), _LENGTH),
    **dict.fromkeys(("blocksize", "contextlength", "context", "maxseqlen", "nctx"), _CONTEXT),
    **dict.fromkeys(("maxpositionembeddings", "modelmaxlength", "maxlength"), _CONTEXT),
    **dict.fromkeys(("mems", "memlen", "statepassing", "window", "slidingwindow"), _MEMORY),
    **dict.fromkeys(("tbptt", "truncatedbptt"), f"{_LENGTH} times optim.gradient_segments"),
    **dict.fromkeys(("epochs", "numepochs", "numtrainepochs"), _STEPS),
    **dict.fromkeys(
        ("maxsteps", "maxiters", "trainiters", "trainsteps", "totalsteps", "trainsamples"), _STEPS
    ),
    "lrdecayiters": "optim.schedule.decay_steps, or optim.steps",
    "torchcompile": "engine.compile",
    "initfrom": "initial_weights; the same command resumes",
    **dict.fromkeys(("ropetheta", "ropebase"), "model.positions=rope, with a base of 10,000"),
    **dict.fromkeys(("fsdp", "fsdp2", "dpshard", "zero", "zerooptimization"), _ZERO),
    **dict.fromkeys(("nlayer", "nlayers", "numhiddenlayers"), "model.num_layers"),
    **dict.fromkeys(("nhead", "nheads", "numattentionheads"), "model.num_heads"),
    **dict.fromkeys(("nembd", "dim", "hiddensize"), "model.d_model"),
    **dict.fromkeys(("dff", "ffndim", "intermediatesize", "ffnhiddensize"), "model.d_inner"),
    **dict.fromkeys(("numquerygroups", "numkeyvalueheads", "nkvhead"), "model.num_key_heads"),
    **dict.fromkeys(("gradclip", "clipgrad", "maxgradnorm"), "optim.clip_norm"),
    **dict.fromkeys(("beta1", "beta2", "adambeta1", "adambeta2"), "optim.betas"),
    **dict.fromkeys(("dtype", "bf16", "fp16", "mixedprecision"), "engine.precision"),
    **dict.fromkeys(
        (
            "gradientcheckpointing",
            "recompute",
            "recomputegranularity",
            "recomputeactivations",
            "remat",
        ),
        "engine.activation_checkpointing",
    ),
    **dict.fromkeys(("saveinterval", "savesteps", "ckptinterval"), "checkpoint.interval"),
    "every": "interval, in checkpoint, evaluation and metrics",
    **dict.fromkeys(("evalinterval", "evalsteps"), "evaluation.interval"),
    "evaliters": "evaluation.max_tokens",
    "savetotallimit": "checkpoint.keep_last",
    **dict.fromkeys(("loggingsteps", "loginterval"), "metrics.interval"),
    **dict.fromkeys(("warmupratio", "warmupfraction"), "optim.schedule.warmup_steps, in steps"),
    **dict.fromkeys(("datapath", "dataset", "datadir"), "data.path, of a built corpus"),
    "tokenizer": "part of the corpus ('data-pipeline settings tokenizer')",
    **dict.fromkeys(("useflashattn", "flashattention"), "engine.attention_kernel"),
    **dict.fromkeys(("tensormodelparallelsize", "tpsize", "pipelinemodelparallelsize"), _NO_PARTS),
    **dict.fromkeys(("outputdir", "outdir", "rundir"), "--run-dir of 'launcher local'"),
    **dict.fromkeys(("train", "training", "trainer"), "data (batches) and optim (steps, rate)"),
    **dict.fromkeys(("wandb", "wandblog", "wandbproject", "reportto"), "metrics.wandb_project"),
    **dict.fromkeys(("device", "gpus", "ddp", "nproc"), "launcher local --ranks N; GPUs if any"),
    **dict.fromkeys(("resume", "resumefromcheckpoint", "load", "ckpt"), _NOTHING),
}
