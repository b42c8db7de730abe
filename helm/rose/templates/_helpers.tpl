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

{{/* Of that Secret only the certificate: the key stays with the operator. */}}
{{- define "rose.nodeTrustVolume" -}}
{{- if include "rose.nodes" . }}
- name: node-trust
  secret:
    secretName: {{ include "rose.nodeAuthority" . }}
    items: [{key: tls.crt, path: tls.crt}]
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
- name: tls
  secret: {secretName: {{ include "rose.tlsSecret" . }}}
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
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Probes of a process that serves /healthz; argument: name of the port. */}}
{{- define "rose.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: {{ . }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /healthz, port: {{ . }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
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

{{/* With DRA: the pod's claim on the node's GPUs. */}}
{{- define "rose.claims" -}}
{{- if .Values.dra.enabled -}}
resourceClaims:
  - name: gpus
    resourceClaimTemplateName: {{ .Values.dra.existingTemplate | default "rose-gpus" }}
{{- end }}
{{- end }}

{{/* Resources of a container that sees GPUs: {root, resources}. */}}
{{- define "rose.resources" -}}
{{- toYaml .resources }}
{{- if .root.Values.dra.enabled }}
claims:
  - name: gpus
{{- end }}
{{- end }}
