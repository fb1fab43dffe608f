#!/usr/bin/env -S bash -ex
# Forecasts of real runs, signed before they start and graded afterwards (docs/forecasts.md): two
# members, Transformer-XL and a hybrid; code, and with BOOKS=FILE_OR_DIR (any input of data-pipeline)
# books; runs of FLOPS, at 3, 10, 30 and 100 times the largest budget of a sweep. 90 minutes on two
# busy cores. Repeated, it continues where it ended.
export OUT=${FORECASTS:-runs/forecasts} OMP_NUM_THREADS=1
FLOPS=${FLOPS:-2.4e11 8e11 2.4e12 8e12}

# Bytes, in documents of at most 10,000 characters: a lane of the smallest runs reads several.
mkdir -p $OUT/cards
CUT="split_characters=10000 shuffle_seed=1"
test -f $OUT/code.jsonl || python -m benchmarks.texts $OUT/code.jsonl --all
test -f $OUT/code/build.json || data-pipeline build configs/data/bytes.yaml \
    --input $OUT/code.jsonl --output $OUT/code validation_fraction=0.01 $CUT
test -z "$BOOKS" -o -f $OUT/books/build.json || data-pipeline build configs/data/bytes.yaml \
    --input "$BOOKS" --output $OUT/books validation_fraction=0.03 $CUT

cells() {  # NAME WORDS...: plan a sweep by these words, run its cells, write its table
    test -f $OUT/$1.yaml || pretrain scale plan "${@:2}" --name $1 --output $OUT/$1.yaml
    launcher sweep submit $OUT/$1.yaml --local -j 2 --runs-dir $OUT/$1
    pretrain scale collect $OUT/$1.yaml --runs-dir $OUT/$1 --output $OUT/cards/$1.csv
}

# Of each corpus and member: the best rates of two sizes, each near the optimum of its FLOPs; four
# budgets of five sizes; a card for each larger budget, and the run that it is about.
for DATA in code ${BOOKS:+books}; do
    for MEMBER in transformer-xl hybrid; do
        NAME=$DATA-$MEMBER TABLE=$OUT/cards/$DATA-$MEMBER
        EXPERIMENT=configs/experiments/forecasts-$MEMBER.yaml
        cells $NAME-small $EXPERIMENT data.path=$OUT/$DATA optim.steps=300 model.d_model=12 \
            model.num_heads=3 model.d_inner=24 --rates 1.2e-2 2.4e-2 4.8e-2 9.6e-2 1.92e-1
        cells $NAME-large $EXPERIMENT data.path=$OUT/$DATA optim.steps=800 model.d_model=28 \
            model.num_heads=7 model.d_inner=56 --rates 6e-3 1.2e-2 2.4e-2 4.8e-2
        TUNED="--keep-layers --tuned $TABLE-small.csv $TABLE-large.csv"
        cells $NAME $EXPERIMENT data.path=$OUT/$DATA $TUNED --budgets 1e10 2e10 4e10 8e10 \
            --sizes 5 --spread 1.7 --tokens-per-parameter 20 --no-checks
        for C in $FLOPS; do
            test -f $TABLE-$C.yaml ||
                pretrain scale forecast $TABLE.csv --flops $C --force -o $TABLE-$C.yaml
            test -f $OUT/$NAME-$C.yaml || pretrain scale fit $TABLE.csv --flops $C --force \
                --law $(sed -n 's/^law: //p' $TABLE-$C.yaml) \
                --experiment $EXPERIMENT $TUNED --write $OUT/$NAME-$C.yaml
        done
    done
done

# All cards are written. Their runs, the cheapest first, two at a time; then the grades and the page.
train() {
    launcher local $OUT/$1.yaml data.path=$OUT/${1%%-*} name=$1 --run-dir $OUT/$1 \
        --forecast $OUT/cards/$1.yaml > $OUT/$1.log 2>&1
}
export -f train
for C in $FLOPS; do (cd $OUT/cards; ls *-$C.yaml); done |
    xargs -P 2 -I{} bash -c 'CARD={}; train ${CARD%.yaml}'
for CARD in $OUT/cards/*.yaml; do
    pretrain scale grade $CARD $OUT/$(basename $CARD .yaml) || test $? = 1  # 1: outside
done
pretrain scale report $OUT/cards --output $OUT/report --title Forecasts
# Open runs/forecasts/report/report.html.
