{{/* Labels every object carries; argument: dict "root" $ "component" NAME. */}}
{{- define "rose.labels" -}}
{{ include "rose.selector" . }}
app.kubernetes.io/part-of: rose
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels by which pods are selected. */}}
{{- define "rose.selector" -}}
app.kubernetes.io/name: rose-{{ .component }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{/* Image of a component; argument: dict "root" $ "component" NAME "image" ITS-OWN-VALUES. */}}
{{- define "rose.image" -}}
{{- $own := .image | default dict -}}
{{- $common := .root.Values.image -}}
{{- $suffix := ternary (printf "-%s" .component) "" $common.perComponent -}}
{{- $repository := $own.repository | default (printf "%s%s" $common.repository $suffix) -}}
{{- if $own.digest -}}
{{ $repository }}@{{ $own.digest }}
{{- else -}}
{{ $repository }}:{{ $own.tag | default $common.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "rose.operatorImage" -}}
{{ include "rose.image" (dict "root" . "component" "operator" "image" .Values.operator.image) }}
{{- end }}

{{- define "rose.agentImage" -}}
{{ include "rose.image" (dict "root" . "component" "agent" "image" .Values.agent.image) }}
{{- end }}

{{- define "rose.weightsImage" -}}
{{ include "rose.image" (dict "root" . "component" "weights" "image" .Values.weightsImage) }}
{{- end }}

{{- define "rose.relay" -}}
{{ printf "%srose-relay.%s.svc:7446" (include "rose.scheme" .) .Release.Namespace }}
{{- end }}

{{/* host:port of the pool of keys that the chart runs. */}}
{{- define "rose.kvPool" -}}
{{ printf "rose-kv-pool.%s.svc:50051" .Release.Namespace }}
{{- end }}

{{- define "rose.tokenSecret" -}}
{{ .Values.token.existingSecret | default "rose-token" }}
{{- end }}

{{/* Where the operator listens for agents. */}}
{{- define "rose.syncAddress" -}}
{{ include "rose.scheme" . }}rose-operator.{{ .Release.Namespace }}.svc:7443
{{- end }}

{{- define "rose.scheme" -}}
{{- if .Values.tls.enabled }}tls://{{ end }}
{{- end }}

{{- define "rose.tlsSecret" -}}
{{- if eq .Values.tls.source "existing" -}}
{{ required "tls.source=existing needs tls.existingSecret" .Values.tls.existingSecret }}
{{- else -}}
rose-tls
{{- end }}
{{- end }}

{{/* Not empty when each node's agent gets a certificate of its own. */}}
{{- define "rose.nodes" -}}
{{- if and .Values.tls.enabled .Values.tls.nodes.enabled .Values.agent.enabled }}true{{ end }}
{{- end }}

{{/* Secret of the authority that signs nodes' certificates. */}}
{{- define "rose.nodeAuthority" -}}
{{ .Values.tls.nodes.existingSecret | default "rose-node-authority" }}
{{- end }}

{{/* Secret of the authority that signs routers' certificates. */}}
{{- define "rose.routerAuthority" -}}
{{ .Values.tls.routers.existingSecret | default "rose-router-authority" }}
{{- end }}

{{/* Not empty when the operator makes the listeners' certificate itself. */}}
{{- define "rose.ownTls" -}}
{{- if and .Values.tls.enabled (eq (include "rose.tlsSource" .) "selfSigned") }}true{{ end }}
{{- end }}

{{/* Not empty when it makes the nodes' authority. */}}
{{- define "rose.ownNodes" -}}
{{- if and (include "rose.nodes" .) (not .Values.tls.nodes.existingSecret) }}true{{ end }}
{{- end }}

{{/* Not empty when it makes the routers' authority. */}}
{{- define "rose.ownRouters" -}}
{{- if and .Values.tls.enabled (not .Values.tls.routers.existingSecret) }}true{{ end }}
{{- end }}

{{/* Names of the Secrets that the operator fills, joined by commas: the chart makes them empty. */}}
{{- define "rose.ownSecrets" -}}
{{- $names := list }}
{{- if not .Values.token.existingSecret }}{{ $names = append $names "rose-token" }}{{ end }}
{{- if include "rose.ownTls" . }}{{ $names = concat $names (list "rose-authority" "rose-tls") }}{{ end }}
{{- if include "rose.ownNodes" . }}{{ $names = append $names "rose-node-authority" }}{{ end }}
{{- if include "rose.ownRouters" . }}{{ $names = append $names "rose-router-authority" }}{{ end }}
{{- join "," $names }}
{{- end }}

{{/* Host names of the certificate of operator and relay, joined by commas. */}}
{{- define "rose.tlsNames" -}}
{{- $names := list }}
{{- range list "rose-operator" "rose-relay" }}
{{- $names = concat $names (list (printf "%s.%s.svc" . $.Release.Namespace) (printf "%s.%s.svc.cluster.local" . $.Release.Namespace)) }}
{{- end }}
{{- join "," (append $names "localhost") }}
{{- end }}

{{/* Where the operator has them: {token, tls, nodes, routers} as folders. */}}
{{- define "rose.ownFolder" -}}/var/run/rose-own{{- end }}

{{- define "rose.tokenVolume" -}}
- name: token
  secret: {secretName: {{ include "rose.tokenSecret" . }}, items: [{key: token, path: token}]}
{{- end }}

{{/* Of that Secret only what is believed: the key stays with the operator. */}}
{{- define "rose.nodeTrustVolume" -}}
{{- if include "rose.nodes" . }}
- name: node-trust
  secret:
    secretName: {{ include "rose.nodeAuthority" . }}
    items: [{key: {{ ternary "ca.crt" "tls.crt" (not (empty (include "rose.ownNodes" .))) }}, path: tls.crt}]
{{- end }}
{{- end }}

{{/* Environment of a container on a node that dials with the node's certificate. */}}
{{- define "rose.identityEnv" -}}
{{- if include "rose.nodes" . }}
- {name: ROSE_TLS_IDENTITY, value: {{ .Values.runDirectory }}/identity}
{{- end }}
{{- end }}

{{/* Where certificates come from: certManager, selfSigned or existing. */}}
{{- define "rose.tlsSource" -}}
{{- if eq .Values.tls.source "auto" -}}
{{ ternary "certManager" "selfSigned" (.Capabilities.APIVersions.Has "cert-manager.io/v1") }}
{{- else -}}
{{ .Values.tls.source }}
{{- end }}
{{- end }}

{{/* Environment, mount and volume of a container that dials tls:// addresses. */}}
{{- define "rose.trustEnv" -}}
{{- if .Values.tls.enabled }}
- {name: ROSE_TLS_CA, value: /var/run/rose-tls/ca.crt}
{{- end }}
{{- end }}

{{- define "rose.trustMount" -}}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /var/run/rose-tls, readOnly: true}
{{- end }}
{{- end }}

{{/* Of the Secret only the authority: the key stays with those who listen. */}}
{{- define "rose.trustVolume" -}}
{{- if .Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "rose.tlsSecret" . }}
    items: [{key: ca.crt, path: ca.crt}]
{{- end }}
{{- end }}

{{- define "rose.certificateVolume" -}}
{{- if .Values.tls.enabled }}
{{- /* Named keys: whoever mounts it before the operator has filled it waits. */}}
- name: tls
  secret:
    secretName: {{ include "rose.tlsSecret" . }}
    items:
      {{- range list "tls.crt" "tls.key" "ca.crt" }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- end }}
{{- end }}

{{/* Environment of a process whose metrics page asks scrapers for a token. */}}
{{- define "rose.metricsEnv" -}}
{{- with .Values.monitoring.tokenSecret }}
- name: ROSE_METRICS_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
{{- end }}
{{- end }}

{{- define "rose.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Labels of pods; argument as for rose.labels. */}}
{{- define "rose.podLabels" -}}
{{ include "rose.labels" . }}
{{- with .root.Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Root without blanket rights: what a container may do is named one by one; argument: list. */}}
{{- define "rose.capabilities" -}}
runAsUser: 0
runAsNonRoot: false
privileged: false
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  add: {{ toJson . }}
{{- end }}

{{/* The same with the runtime's filter of system calls; engines' own containers go without, because it forbids what binds memory to a socket. */}}
{{- define "rose.confined" -}}
{{ include "rose.capabilities" . }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* No rights at all. */}}
{{- define "rose.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Not empty where the tap runs. */}}
{{- define "rose.tap" -}}
{{- $asked := .Values.agent.tap.enabled -}}
{{- if ternary .Values.lending.enabled $asked (eq (toString $asked) "auto") }}true{{ end }}
{{- end }}

{{- define "rose.nobody" -}}
runAsNonRoot: true
{{- if not (include "rose.openshift" .) }}
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Not empty on OpenShift, which gives every namespace users of its own and asks for constraints. */}}
{{- define "rose.openshift" -}}
{{- $asked := .Values.openshift.enabled }}
{{- if ternary (.Capabilities.APIVersions.Has "security.openshift.io/v1") $asked (eq (toString $asked) "auto") }}true{{ end }}
{{- end }}

{{/* Security context of a pod that shares folders and processes with its node. */}}
{{- define "rose.nodePod" -}}
{{- $type := .Values.seLinuxType }}
{{- if and (not $type) (include "rose.openshift" .) }}{{ $type = "spc_t" }}{{ end }}
{{- with $type }}
securityContext:
  # SELinux would keep a container from its node's folders and from the processes of others.
  seLinuxOptions: {type: {{ . }}}
{{- end }}
{{- end }}

{{/* Rights of each container on a node, also for OpenShift's constraints; JSON of a list. */}}
{{- define "rose.guardRights" -}}
{{ toJson (ternary (list "SYS_PTRACE" "DAC_OVERRIDE" "KILL") list .Values.lending.enabled) }}
{{- end }}
{{- define "rose.tapRights" -}}["NET_RAW","SYS_ADMIN","SYS_PTRACE","DAC_OVERRIDE"]{{- end }}
{{- define "rose.sleeperRights" -}}["KILL"]{{- end }}
{{- define "rose.hostRights" -}}["CHOWN","DAC_OVERRIDE","FOWNER","KILL","SETGID","SETPCAP","SETUID"]{{- end }}
{{- define "rose.mpsRights" -}}["SYS_PTRACE","DAC_OVERRIDE","KILL","SETUID","SETGID","FOWNER"]{{- end }}

{{/*
What tells leases apart whose joined names are one, a-b/c and a/b-c: lease_digest of
rose_core.wire.enrolment; argument: {namespace, name}.
*/}}
{{- define "rose.leaseDigest" -}}
{{- printf "%s/%s" .namespace .name | sha256sum | trunc 8 }}
{{- end }}

{{/* Name of what belongs to a lease's sandbox hosts; argument: an entry of sandboxes.leases. */}}
{{- define "rose.sandboxes" -}}
{{- $namespace := required "sandboxes.leases: each names the namespace of its lease" .namespace }}
{{- $lease := required "sandboxes.leases: each names its lease (name)" .name }}
{{- if contains "." $lease }}{{ fail (printf "sandboxes.leases: %s/%s has a point in its name: no Service can be called so" $namespace $lease) }}{{ end }}
{{- $name := printf "rose-sandboxes-%s-%s-%s" $namespace $lease (include "rose.leaseDigest" .) }}
{{- if gt (len $name) 58 }}{{ fail (printf "sandboxes.leases: %s/%s is too long: a Service is called rose-sandboxes-NAMESPACE-NAME-DIGEST, 58 characters at most" $namespace $lease) }}{{ end }}
{{- $name }}
{{- end }}

{{/* Peers of a NetworkPolicy that read metrics, beside ROSE's own; YAML of a list. */}}
{{- define "rose.metricsReaders" -}}
{{- $readers := list }}
{{- range .Values.networkPolicy.metricsNamespaces }}
{{- $readers = append $readers (dict "namespaceSelector" (dict "matchLabels" (dict "kubernetes.io/metadata.name" .))) }}
{{- end }}
{{- toYaml $readers }}
{{- end }}

{{/* A policy's egress to the name service. Policies see its pods' port, which is another one on OpenShift. */}}
{{- define "rose.dns" -}}
ports:
  - {port: 53, protocol: UDP}
  - {port: 53, protocol: TCP}
  {{- if include "rose.openshift" . }}
  - {port: 5353, protocol: UDP}
  - {port: 5353, protocol: TCP}
  {{- end }}
{{- end }}

{{/* Probes of a process that serves /healthz: {root, port (its name), ready (seconds; none = no such probe)}. */}}
{{- define "rose.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: {{ .port }}}
  {{- toYaml .root.Values.probes.startup | nindent 2 }}
livenessProbe:
  httpGet: {path: /healthz, port: {{ .port }}}
  {{- toYaml .root.Values.probes.liveness | nindent 2 }}
{{- if .ready }}
readinessProbe:
  httpGet: {path: /healthz, port: {{ .port }}}
  periodSeconds: {{ .ready }}
  timeoutSeconds: 5
{{- end }}
{{- end }}

{{/* Where models are: a folder of the node, or image volumes below /models; argument: an engine host's values. */}}
{{- define "rose.modelMounts" -}}
{{- range $index, $model := .modelImages }}
- name: model-{{ $index }}
  mountPath: /models/{{ $model.name }}
  {{- with $model.subPath }}
  subPath: {{ . }}
  {{- end }}
  readOnly: true
{{- else }}
- {name: models, mountPath: {{ .modelsPath }}, readOnly: true}
{{- end }}
{{- end }}

{{/* {root, host (an engine host's values)}. */}}
{{- define "rose.modelVolumes" -}}
{{- $root := .root }}
{{- if and .host.modelImages (semverCompare "<1.33.0-0" $root.Capabilities.KubeVersion.Version) }}
{{- fail "engineHost.modelImages: image volumes need Kubernetes 1.33 or later, on by default from 1.35; use engineHost.modelsPath" }}
{{- end }}
{{- $names := list }}
{{- range $index, $model := .host.modelImages }}
{{- if has $model.name $names }}{{ fail (printf "engineHost.modelImages: two are called %q" $model.name) }}{{ end }}
{{- $names = append $names $model.name }}
- name: model-{{ $index }}
  image:
    reference: {{ $model.image }}
    pullPolicy: {{ $model.pullPolicy | default $root.Values.image.pullPolicy }}
{{- else }}
- name: models
  hostPath: {path: {{ .host.modelsPath }}, type: DirectoryOrCreate}
{{- end }}
{{- end }}

{{/* Placement of pods; argument: a component's values. */}}
{{- define "rose.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Every engine class the installation offers: the hosts' own and those of the variants. */}}
{{- define "rose.engineClasses" -}}
{{- $classes := .Values.engineHost.engineClasses }}
{{- range .Values.engineHost.variants }}
{{- $classes = concat $classes .engineClasses }}
{{- end }}
{{- join "," (uniq $classes) -}}
{{- end }}

{{/* How containers are shown GPUs: None, Auto or a mode of gpus.access; looked up once a rendering. */}}
{{- define "rose.gpuAccess" -}}
{{- if not (hasKey .Values "resolved") }}{{ $_ := set .Values "resolved" dict }}{{ end }}
{{- if not (hasKey .Values.resolved "access") }}
{{- $_ := set .Values.resolved "access" (include "rose.findGpuAccess" . | trim) }}
{{- end }}
{{- .Values.resolved.access }}
{{- end }}

{{/* The first that fits; what a mere rendering looks up is not there. */}}
{{- define "rose.findGpuAccess" -}}
{{- if ne .Values.agent.devices "nvml" }}None
{{- else if ne .Values.gpus.access "Auto" }}{{ .Values.gpus.access }}
{{- else if .Values.dra.enabled }}DRA
{{- else if or .Values.agent.runtimeClassName (lookup "node.k8s.io/v1" "RuntimeClass" "" (include "rose.runtimeClass" .)) }}RuntimeClass
{{- else if include "rose.hasNriPlugin" . }}NRI
{{- else if include "rose.hasGpuDeviceClass" . }}DRA
{{- else if include "rose.hasNodeLabelled" (dict "labels" (list "cloud.google.com/gke-accelerator")) }}HostPath
{{- else }}Auto
{{- end }}
{{- end }}

{{- define "rose.runtimeClass" -}}
{{ .Values.gpus.runtimeClassName | default "nvidia" }}
{{- end }}

{{/* The GPU operator's policy says whether its toolkit injects by NRI. */}}
{{- define "rose.hasNriPlugin" -}}
{{- if .Capabilities.APIVersions.Has "nvidia.com/v1/ClusterPolicy" }}
{{- range (lookup "nvidia.com/v1" "ClusterPolicy" "" "").items }}
{{- if dig "cdi" "nriPluginEnabled" false .spec }}true{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{/* A driver that does dynamic resource allocation, and a namespace that may claim admin access. */}}
{{- define "rose.hasGpuDeviceClass" -}}
{{- if .Capabilities.APIVersions.Has "resource.k8s.io/v1/DeviceClass" }}
{{- if lookup "resource.k8s.io/v1" "DeviceClass" "" .Values.dra.deviceClassName }}
{{- $own := lookup "v1" "Namespace" "" .Release.Namespace }}
{{- if eq (dig "metadata" "labels" "resource.kubernetes.io/admin-access" "" $own) "true" }}true{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Not empty when a node has one of these labels; argument: dict "labels" LIST. */}}
{{- define "rose.hasNodeLabelled" -}}
{{- $found := dict }}
{{- $labels := .labels }}
{{- range (lookup "v1" "Node" "" "").items }}
{{- range $label := keys (.metadata.labels | default dict) }}
{{- if has $label $labels }}{{ $_ := set $found "any" true }}{{ end }}
{{- end }}
{{- end }}
{{- if $found }}true{{ end }}
{{- end }}

{{/* Not empty when agents go to labelled nodes alone. */}}
{{- define "rose.labelledNodes" -}}
{{- if not (hasKey .Values "resolved") }}{{ $_ := set .Values "resolved" dict }}{{ end }}
{{- if not (hasKey .Values.resolved "labelled") }}
{{- $access := include "rose.gpuAccess" . }}
{{- $labelled := eq .Values.gpus.nodes "Labelled" }}
{{- if and (eq .Values.gpus.nodes "Auto") (ne $access "None") }}
{{- $labelled = or (has $access (list "RuntimeClass" "CDI")) (include "rose.hasNodeLabelled" (dict "labels" .Values.gpus.nodeLabels)) }}
{{- end }}
{{- $_ := set .Values.resolved "labelled" (ternary "true" "" (not (empty $labelled))) }}
{{- end }}
{{- .Values.resolved.labelled }}
{{- end }}

{{/* Affinity of what runs on GPU nodes: {root, avoid (node expressions that must hold as well)}. */}}
{{- define "rose.affinity" -}}
{{- $affinity := deepCopy .root.Values.affinity }}
{{- $avoid := .avoid | default list }}
{{- if not (hasKey $affinity "nodeAffinity") }}
{{- $terms := list }}
{{- if include "rose.labelledNodes" .root }}
{{- range .root.Values.gpus.nodeLabels }}
{{- $terms = append $terms (dict "matchExpressions" (prepend $avoid (dict "key" . "operator" "Exists"))) }}
{{- end }}
{{- else if $avoid }}
{{- $terms = list (dict "matchExpressions" $avoid) }}
{{- end }}
{{- if $terms }}
{{- $_ := set $affinity "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms)) }}
{{- end }}
{{- else if $avoid }}
{{- fail "affinity.nodeAffinity and engineHost.variants exclude each other: variants need node expressions of their own; use nodeSelector or gpus.nodeLabels" }}
{{- end }}
{{- with $affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Of a pod that sees GPUs: class and claims: {root, class (one of its own)}. */}}
{{- define "rose.gpuPod" -}}
{{- $access := include "rose.gpuAccess" .root }}
{{- if .class }}
runtimeClassName: {{ .class }}
{{- else if has $access (list "RuntimeClass" "CDI") }}
runtimeClassName: {{ include "rose.runtimeClass" .root }}
{{- end }}
{{- if eq $access "DRA" }}
resourceClaims:
  - name: gpus
    resourceClaimTemplateName: {{ .root.Values.dra.existingTemplate | default "rose-gpus" }}
{{- end }}
{{- end }}

{{/* Annotations by which NVIDIA's NRI plugin knows the containers: {root, containers}. */}}
{{- define "rose.gpuAnnotations" -}}
{{- if has (include "rose.gpuAccess" .root) (list "Auto" "NRI") }}
{{- $device := .root.Values.gpus.cdiDevice }}
{{- range .containers }}
nvidia.cdi.k8s.io/container.{{ . }}: {{ $device }}
{{- end }}
{{- end }}
{{- end }}

{{/* Environment of a container that sees GPUs. */}}
{{- define "rose.gpuEnv" -}}
{{- $access := include "rose.gpuAccess" . }}
{{- if ne $access "None" }}
- {name: ROSE_GPU_ACCESS, value: {{ $access }}}
{{- if has $access (list "Auto" "RuntimeClass") }}
- {name: NVIDIA_VISIBLE_DEVICES, value: all}
- {name: NVIDIA_DRIVER_CAPABILITIES, value: "compute,utility"}
{{- else if eq $access "CDI" }}
- {name: NVIDIA_VISIBLE_DEVICES, value: {{ .Values.gpus.cdiDevice | quote }}}
{{- else if eq $access "HostPath" }}
- {name: ROSE_DRIVER_ROOT, value: /usr/local/nvidia}
{{- end }}
{{- end }}
{{- end }}

{{/* The driver, where no runtime brings it; CUDA images look below /usr/local/nvidia by themselves. */}}
{{- define "rose.gpuMounts" -}}
{{- if eq (include "rose.gpuAccess" .) "HostPath" }}
- {name: driver, mountPath: /usr/local/nvidia, readOnly: true, mountPropagation: HostToContainer}
{{- end }}
{{- end }}

{{- define "rose.gpuVolumes" -}}
{{- if eq (include "rose.gpuAccess" .) "HostPath" }}
- name: driver
  hostPath: {path: {{ .Values.gpus.driverRoot }}, type: DirectoryOrCreate}
{{- end }}
{{- end }}

{{/* Without a runtime that shows the GPUs, only a privileged container may open their files. */}}
{{- define "rose.gpuPrivileged" -}}
{{- if eq (include "rose.gpuAccess" .) "HostPath" }}true{{ end }}
{{- end }}

{{/* Resources of a container that sees GPUs: {root, resources}. */}}
{{- /* Resources with a limit of memory where none is written. dict "resources" "mebibytes"; 0 = none. */}}
{{- define "rose.limited" -}}
{{- $limits := .resources.limits | default dict }}
{{- if and .mebibytes (not (hasKey $limits "memory")) }}
{{- $limits = merge (dict "memory" (printf "%dMi" (int64 .mebibytes))) $limits }}
{{- end }}
{{- toYaml (ternary (set (deepCopy .resources) "limits" $limits) .resources (gt (len $limits) 0)) }}
{{- end }}

{{- define "rose.resources" -}}
{{- toYaml .resources }}
{{- if eq (include "rose.gpuAccess" .root) "DRA" }}
claims:
  - name: gpus
{{- end }}
{{- end }}
