#!/usr/bin/env -S bash -ex
# A toy of state passing on a CPU: a tiny Gated DeltaNet hybrid of transformers is trained on windows
# of 64 tokens, then for 500 steps with carried state; its loss by position before and after.
# TEXT is a file of a few MB; needs `make venv-hybrids` and its PYTHONPATH (docs/hybrids.md).
OUT=${STATE_PASSING:-runs/state-passing}
SEEDS=${SEEDS:-0}
export OMP_NUM_THREADS=${THREADS:-1} PYTHONPATH=$PWD:$PYTHONPATH

mkdir -p $OUT
for SEED in $SEEDS; do
    python examples/state_passing.py train "${TEXT:-input.txt}" $OUT/before$SEED $SEED ${STEPS:-}
    test -d $OUT/data || data-pipeline build --input "${TEXT:-input.txt}" --output $OUT/data \
        tokenizer.path=$OUT/before$SEED format=stream validation_fraction=0.1 test_bytes=0
    rm -rf $OUT/passed$SEED.yaml $OUT/run$SEED $OUT/after$SEED
    pretrain adopt $OUT/before$SEED --output $OUT/passed$SEED.yaml --corpus $OUT/data seed=$SEED \
        data.lanes=16 data.segment_length=64 model.memory_length=64 optim.learning_rate=3e-4 \
        ${PASSED:+optim.steps=$PASSED optim.schedule.warmup_steps=1}
    pretrain train $OUT/passed$SEED.yaml --run-dir $OUT/run$SEED
    pretrain export $OUT/run$SEED --format huggingface --output $OUT/after$SEED
    python examples/state_passing.py losses $OUT/data $OUT/losses$SEED.csv \
        before=$OUT/before$SEED after=$OUT/after$SEED
done
