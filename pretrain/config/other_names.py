"""Settings of other systems and the one that does the same here, for errors and `settings`."""

import re

# What to use <- the names, in lower case, without hyphens and underscores.
_TABLE = """
optim.learning_rate <- lr maxlr peaklr baselr
optim.schedule.final_fraction, a part of the rate <- minlr lrmin
optim.schedule.shape <- lrscheduler lrschedulertype lrdecaystyle scheduler decaylr
optim.schedule.warmup_steps <- warmup warmupiters lrwarmupiters
data.lanes, of all ranks <- batch batchsize globalbatchsize trainbatchsize
engine.micro_batch_lanes; accumulation follows <- microbatchsize localbatchsize
    perdevicetrainbatchsize devicebatchsize gradientaccumulationsteps gradaccum accumulation
data.segment_length <- seqlen seqlength sequencelength tgtlen bptt
data.segment_length, and model.memory_length for what is remembered before it <- blocksize
    contextlength context maxseqlen maxseqlength nctx maxpositionembeddings modelmaxlength maxlength
model.memory_length, the tokens that a layer attends to before a segment <- mems memlen statepassing
    window slidingwindow
data.segment_length times optim.gradient_segments <- tbptt truncatedbptt
optim.steps = tokens / (data.lanes * data.segment_length); see 'pretrain describe' <- epochs
    numepochs numtrainepochs maxsteps maxiters trainiters trainsteps totalsteps trainsamples
    totaltokens traintokens numtokens
optim.steps; with schedule.shape=wsd its decay_steps <- lrdecayiters
engine.compile <- torchcompile
initial_weights; the same command resumes <- initfrom finetune pretrainedmodel
model.positions=rope, with a base of 10,000 <- ropetheta ropebase rotarybase
engine.zero_stage: 3 shards all <- fsdp fsdp2 dpshard dataparallelsharddegree zero stage
    zerooptimization usedistributedoptimizer
model.num_layers <- nlayer nlayers numhiddenlayers layers depth
model.num_heads <- nhead nheads numattentionheads heads
model.d_model <- nembd dim hiddensize width
model.d_inner <- dff ffndim intermediatesize ffnhiddensize
model.num_key_heads <- kvheads numkvheads numquerygroups numkeyvalueheads nkvhead
optim.clip_norm <- gradclip clipgrad maxgradnorm maxnorm
optim.betas <- beta1 beta2 adambeta1 adambeta2
engine.precision <- dtype bf16 fp16 mixedprecision amp
engine.activation_checkpointing <- activationcheckpoint gradientcheckpointing recompute
    recomputegranularity recomputeactivations remat
checkpoint.interval <- saveinterval savesteps ckptinterval savestrategy alwayssavecheckpoint
interval, in checkpoint, evaluation and metrics <- every
evaluation.interval <- evalinterval evalsteps evalstrategy evaluationstrategy
evaluation.max_tokens <- evaliters
checkpoint.keep_last <- savetotallimit
metrics.interval <- loggingsteps loginterval logfreq
optim.schedule.warmup_steps, in steps <- warmupratio warmupfraction
data.path, of a built corpus <- datapath dataset datadir
validation_fraction of a corpus ('data-pipeline settings validation') <- split
model.init_std <- initmethodstd initializerrange
optim.name <- optimizer optimizertype optimizername
model.tie_embeddings <- tiewordembeddings untieembeddingsandoutputweights
model.d_head <- headdim
model.dropout <- residpdrop hiddendropout hiddendropoutprob
name <- runname
part of the corpus ('data-pipeline settings tokenizer') <- tokenizer tokenizertype tokenizerpath
engine.attention_kernel <- useflashattn useflashattention flashattention attnimplementation
engine.zero_stage; layers are not split <- tp tensorparallel pp tensormodelparallelsize
    tpsize pipelinemodelparallelsize tensorparalleldegree pipelineparalleldegree sequenceparallel
    contextparalleldegree contextparallelsize
--run-dir of 'launcher local' <- outputdir outdir rundir save folder dumpfolder rundirectory
data (batches) and optim (steps, rate) <- train training trainer
metrics.wandb_project <- wandb wandblog wandbproject reportto enablewandb
--ranks of 'launcher local', --nodes of 'launcher submit', or a cluster file <- device gpus ddp
    nproc nodes ranks worldsize cluster slurm numgpus nprocpernode nnodes gpuspernode
in the cluster file, as a setting or in options <- partition account qos walltime constraint
    containerimage
nothing: jobs are requeued <- requeue
engine.offload_optimizer <- cpuoffload optimizeroffload
nothing: the same command resumes <- resume resumefromcheckpoint load ckpt
evaluation.lanes <- evalbatchsize perdeviceevalbatchsize
optim.epsilon <- adamepsilon eps
model.layer_kinds <- layertypes
model.norm <- normalization layernorm
'pretrain evaluate RUN' <- evalonly
nothing: RUN@best is the kept checkpoint with the lowest validation loss <- loadbestmodelatend
    metricforbestmodel earlystopping earlystoppingpatience
'pretrain export --format huggingface' <- pushtohub
nothing: each rank reads its own lanes ahead <- numworkers dataloadernumworkers
nothing: of linear layers, only feed-forward ones that are not gated have biases <- bias
data.phases, with other lanes <- rampupbatchsize batchsizerampup
a file of configs/models, as extends: in the experiment <- flavor modelsize
data.mixture <- blend datablend
checkpoint.asynchronous <- asyncsave asyncmode
engine.precision: fp32, bf16 or fp16 <- float8 fp8
metrics.profile_steps <- profiling enableprofiling profile
time_limit of the cluster file <- exitdurationinmins
'pretrain new --parameters N', or a file of configs/models and model.num_layers <- parameters params
"""

OTHER_NAMES = {
    name: answer
    for answer, names in (row.split(" <- ") for row in re.split(r"\n(?! )", _TABLE.strip()))
    for name in names.split()
}
