#!/usr/bin/env -S bash -ex
# Members of the family at equal training FLOPs, as docs/variants.md describes. QUICK=1 takes two
# minutes and learns nothing; CORPUS is a directory of your own, MEMBERS the file of a comparison,
# JOBS the runs at a time, CLUSTER a file of a Slurm cluster (repeat when its jobs have ended).
MEMBERS=${MEMBERS:-configs/comparisons/variants${QUICK:+-quick}.yaml}
NAME=$(basename "$MEMBERS" .yaml)${CORPUS:+-$(basename "$CORPUS")}
OUT=runs/$NAME
TEXT=runs/variants-text
TOKENS=$(test -n "$QUICK" && echo 8k || echo 80k)

# Without a corpus: Python's standard library, in bytes.
test -n "$CORPUS" || test -f $TEXT/text.jsonl || python -m benchmarks.texts $TEXT/text.jsonl
test -n "$CORPUS" || test -f $TEXT/data/build.json || data-pipeline build configs/data/bytes.yaml \
    --input $TEXT/text.jsonl --output $TEXT/data validation_fraction=0.06 shard_bytes=524288

pretrain scale plan "$MEMBERS" --name "$NAME" --output "$OUT/sweep.yaml" \
    data.path="$(realpath "${CORPUS:-$TEXT/data}")"
WHERE=${CLUSTER:+--cluster $CLUSTER}
launcher sweep submit "$OUT/sweep.yaml" ${WHERE:---local -j ${JOBS:-2}}

# How far each member remembers, then the table and the page.
pretrain evaluate "$OUT"/c*-s* --probe needle position --longest-distance 512 \
    --max-tokens "$TOKENS" > "$OUT/probes.txt"
pretrain scale collect "$OUT/sweep.yaml"
pretrain scale report "$OUT/runs.csv" --output "$OUT/report"
