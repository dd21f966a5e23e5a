# The collection in a container, from Debian's Python:
#     docker build -t mgpu_tutorial .
#     docker run --rm -p 127.0.0.1:8888:8888 mgpu_tutorial              (JupyterLab)
#     docker run --rm --shm-size 1g mgpu_tutorial make test             (every check)
FROM debian:12-slim
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates git make python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home learner
USER learner
WORKDIR /home/learner/course
COPY --chown=learner constraints.txt pyproject.toml Makefile README.md LICENSE ./
COPY --chown=learner tools tools
COPY --chown=learner mgpu_tutorial mgpu_tutorial
RUN make setup TORCH_BUILD=cpu && rm -rf /home/learner/.cache
COPY --chown=learner . .
EXPOSE 8888
CMD ["make", "lab", "LAB=--ServerApp.ip=0.0.0.0"]
