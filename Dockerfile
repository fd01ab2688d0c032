# qerl_pl for an NVIDIA GPU: CUDA 13 and the versions that were measured. This image has not been built by the project.
#   docker build -t qerl_pl .
#   docker run --gpus all --ipc host -v "$PWD/runs:/home/qerl/runs" qerl_pl fit -c gsm8k -c qwen2.5_3b -c small_card
# The quickstart on a CPU: docker run qerl_pl fit -c quickstart --resume auto
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# Triton compiles with a C compiler and Python's headers. Ubuntu's mirrors keep no old versions to pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc git python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1001 --shell /bin/bash qerl \
    && mkdir /opt/qerl /opt/venv \
    && chown qerl:qerl /opt/qerl /opt/venv

USER 1001
WORKDIR /opt/qerl
RUN python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# The large packages first, so that a change of the code does not install them again. vLLM pins PyTorch.
RUN pip install vllm==0.25.1 transformers==5.17.0 peft==0.21.0 lightning==2.6.6 "bitsandbytes>=0.49,<0.51"
COPY --chown=qerl:qerl pyproject.toml README.md LICENSE ./
COPY --chown=qerl:qerl configs configs
COPY --chown=qerl:qerl kernels kernels
COPY --chown=qerl:qerl qerl_pl qerl_pl
# The folder just copied has no version to pin; what it needs is pinned above.
# hadolint ignore=DL3013
RUN pip install '.[vllm,baselines]' && mkdir /home/qerl/runs

WORKDIR /home/qerl
ENTRYPOINT ["qerl"]
CMD ["--help"]
