# The decision server over a bundle that is mounted at /bundle:
#   docker build --tag clef-trt .
#   docker run --publish 8000:8000 --volume "$PWD/clef-flash.bundle:/bundle:ro" clef-trt
# A bundle that points into a release needs that too: mount it at the same path, or name its place with
# --env CLEF_TRT_WEIGHTS=/release. Every setting of `clef-trt serve --help` is an --env CLEF_TRT_….
FROM python:3.13-slim

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY clef_trt clef_trt
COPY export export
COPY engines engines
COPY bench/shapes bench/shapes
RUN pip install --no-cache-dir --constraint constraints.txt '.[serve]' && rm -rf /src/*

RUN useradd --create-home --uid 10001 clef
USER clef
WORKDIR /home/clef

ENV CLEF_TRT_BUNDLE=/bundle CLEF_TRT_HOST=0.0.0.0 CLEF_TRT_PORT=8000
EXPOSE 8000
STOPSIGNAL SIGTERM
# Alive, not ready: loading and warm-up may take minutes, and are no reason to be restarted.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ['CLEF_TRT_PORT'] + '/health', timeout=4)"]
CMD ["clef-trt", "serve"]
