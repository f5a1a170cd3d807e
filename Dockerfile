# One image for head and workers, so that all have the same Python, Ray and Rayfin.
#
#   docker build -t rayfin:0.1.0 .
#
# torch comes from pip's index, which has a CUDA build. For CPUs only:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \
#                --build-arg TORCH=torch==2.13.0+cpu -t rayfin:0.1.0-cpu .
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/rayfin
ENV PATH=/opt/rayfin/bin:$PATH
WORKDIR /src
ARG PIP_EXTRA_INDEX_URL=""
ARG TORCH="torch==2.13.0"
COPY constraints.txt ./
RUN grep -v '^torch==' constraints.txt > /tmp/constraints.txt && \
    pip install --no-cache-dir "$TORCH" -c /tmp/constraints.txt
COPY . .
RUN pip install --no-cache-dir -c /tmp/constraints.txt .

FROM python:${PYTHON}-slim
# KubeRay's probes and init containers call wget and procps. Triton compiles its driver stub with gcc
# at its first launch.
RUN apt-get update && \
    apt-get install --yes --no-install-recommends wget procps libgomp1 gcc libc6-dev && \
    rm -rf /var/lib/apt/lists/* && useradd --uid 1000 --create-home ray
COPY --from=build /opt/rayfin /opt/rayfin
ENV PATH=/opt/rayfin/bin:$PATH PYTHONUNBUFFERED=1
USER ray
WORKDIR /home/ray
EXPOSE 8000 8080 8265 6379 10001
CMD ["rayfin", "serve", "--host", "0.0.0.0"]
