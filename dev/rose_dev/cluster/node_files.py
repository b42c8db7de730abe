"""Configuration files of the node: pure functions from a place to text or objects.

The settings without which a node does not come up on a small development machine are marked.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from rose_dev.cluster.place import NodeAddress, NodeFolders

PAUSE_IMAGE = "localhost/pause:dev"


def containerd(place: NodeFolders) -> str:
    """Containerd's configuration; works with Debian's 1.6."""
    return f"""version = 2
root = "{place.data}/containerd"
state = "{place.run}/containerd"
[grpc]
  address = "{place.containerd}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{place.data}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  # Without CAP_SYS_RESOURCE no pod starts otherwise (runc: "can't get final child's PID").
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{place.run}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""


def cni(seat: NodeAddress) -> str:
    """The pods' network: one routed link per pod, no bridge, no masquerade, no default route."""
    beyond = (seat.ranges.pods, seat.ranges.services, seat.ranges.links)
    link = {
        "type": "ptp",
        "ipMasq": False,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": seat.pods}]],
            "routes": [{"dst": range_} for range_ in beyond],
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    chain = {"cniVersion": "1.0.0", "name": seat.name, "plugins": [link, ports]}
    return json.dumps(chain, indent=1)


def kubelet(place: NodeFolders, pki: Path) -> str:
    """Kubelet's configuration."""
    return yaml.safe_dump(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,  # kubelet refuses machines with cgroup v1 otherwise
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{place.seat.cgroup}",
            "containerRuntimeEndpoint": f"unix://{place.containerd}",
            "address": place.seat.address,
            "readOnlyPort": 0,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(pki / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(pki / f"{place.seat.name}-serving.crt"),
            "tlsPrivateKeyFile": str(pki / f"{place.seat.name}-serving.key"),
            "clusterDomain": "cluster.local",
            "clusterDNS": [place.seat.ranges.dns_service],
            "resolvConf": str(place.run / "resolv.conf"),
            "failSwapOn": False,
            "maxOpenFiles": 20000,
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
            "imageGCHighThresholdPercent": 100,
            "podLogsDir": str(place.run / "pod-logs"),
            "volumePluginDir": str(place.run / "volume-plugins"),
            "nodeStatusUpdateFrequency": "5s",
            # How soon a pod sees that a mounted Secret has changed; the default is a minute.
            "syncFrequency": "5s",
        },
        sort_keys=False,
    )


def kube_proxy(seat: NodeAddress, pki: Path) -> str:
    """kube-proxy's configuration."""
    return yaml.safe_dump(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clusterCIDR": seat.ranges.pods,
            "hostnameOverride": seat.name,
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
            "clientConnection": {"kubeconfig": str(pki / "proxy.conf")},
            "conntrack": {"maxPerCore": 0},  # the limit belongs to the machine
        },
        sort_keys=False,
    )


def audit_policy() -> str:
    """Who asked for what, of every service account but Kubernetes' own; no bodies."""
    return yaml.safe_dump(
        {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "rules": [
                {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
                {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
                {"level": "None"},
            ],
        },
        sort_keys=False,
    )


def corefile(seat: NodeAddress, pki: Path) -> str:
    """CoreDNS's configuration: the cluster's names and nothing else."""
    return f""".:53 {{
    errors
    bind {seat.address}
    ready 127.0.0.1:8181
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {pki / "dns.conf"} rose-dev
        pods insecure
        ttl 5
    }}
    cache 5
}}
"""


def dns_objects(seat: NodeAddress) -> str:
    """The Service behind which pods find CoreDNS, which runs beside the node and not in a pod."""
    port = {"port": 53, "targetPort": 53}
    protocols = {"dns": "UDP", "dns-tcp": "TCP"}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system"},
        "spec": {
            "clusterIP": seat.ranges.dns_service,
            "ports": [{"name": n, "protocol": p, **port} for n, p in protocols.items()],
        },
    }
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "kube-dns-node",
            "namespace": "kube-system",
            "labels": {"kubernetes.io/service-name": "kube-dns"},
        },
        "addressType": "IPv4",
        "ports": [{"name": n, "protocol": p, "port": 53} for n, p in protocols.items()],
        "endpoints": [{"addresses": [seat.address], "conditions": {"ready": True}}],
    }
    return yaml.safe_dump_all([service, endpoints], sort_keys=False)


def api_hosts(seat: NodeAddress) -> list[str]:
    """Further names and addresses under which the API server is reached."""
    return [seat.ranges.api_service, seat.address]
