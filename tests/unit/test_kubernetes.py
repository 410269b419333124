"""The manifest in the guide: its schema is scripts/check's; here, what the schema does not know."""

from pathlib import Path

import pytest
import yaml

from vllm_zen.envs import VARIABLES

MANIFEST = Path(__file__).parents[2] / "docs" / "guides" / "kubernetes.yaml"


@pytest.fixture(scope="module")
def documents():
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text())}


@pytest.fixture(scope="module")
def pod(documents):
    return documents["Deployment"]["spec"]["template"]


def test_every_container_makes_the_pod_guaranteed_with_whole_cpus(pod):
    containers = pod["spec"]["containers"] + pod["spec"].get("initContainers", [])
    for container in containers:
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]
        assert resources["limits"]["cpu"].isdecimal()


def test_kv_cache_and_shared_memory_fit_into_the_memory(pod):
    [container] = pod["spec"]["containers"]
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    [shm] = [volume["emptyDir"] for volume in pod["spec"]["volumes"] if volume["name"] == "shm"]
    assert shm["medium"] == "Memory"
    assert int(environment["VLLM_CPU_KVCACHE_SPACE"]) + int(shm["sizeLimit"].removesuffix("Gi")) < limit
    assert set(environment) <= {"VLLM_CPU_KVCACHE_SPACE", "VLLM_API_KEY", *(v.name for v in VARIABLES)}


def test_probes_scrape_and_service_meet_on_the_servers_port(documents, pod):
    [container] = pod["spec"]["containers"]
    [port] = container["ports"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    annotations = pod["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port["containerPort"]) == "8000"
    service = documents["Service"]["spec"]
    assert service["ports"][0]["targetPort"] == port["name"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()


def test_it_runs_as_the_images_user_and_hides_the_key(pod):
    dockerfile = (MANIFEST.parents[2] / "docker" / "Dockerfile.zen").read_text()
    user = pod["spec"]["securityContext"]["runAsUser"]
    assert f"USER {user}\n" in dockerfile and pod["spec"]["securityContext"]["runAsNonRoot"] is True
    [key] = [entry for entry in pod["spec"]["containers"][0]["env"] if entry["name"] == "VLLM_API_KEY"]
    assert "value" not in key and key["valueFrom"]["secretKeyRef"]


def test_no_service_variable_is_taken_for_one_of_vllms(documents, pod):
    """Kubernetes gives each Service a variable NAME_PORT, and vLLM refuses a VLLM_PORT that is a URI."""
    assert not documents["Service"]["metadata"]["name"].startswith("vllm")
    assert pod["spec"]["enableServiceLinks"] is False
