{{/* Labels every object carries; argument: dict "root" $ "component" NAME. */}}
{{- define "rose.labels" -}}
{{ include "rose.selector" . }}
app.kubernetes.io/part-of: rose
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* Labels by which pods are selected. */}}
{{- define "rose.selector" -}}
app.kubernetes.io/name: rose-{{ .component }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{- define "rose.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "rose.engineHostImage" -}}
{{- if .Values.engineHost.image.repository -}}
{{ .Values.engineHost.image.repository }}:{{ .Values.engineHost.image.tag | default .Chart.AppVersion }}
{{- else -}}
{{ include "rose.image" . }}
{{- end }}
{{- end }}

{{- define "rose.tokenSecret" -}}
{{ .Values.token.existingSecret | default "rose-token" }}
{{- end }}

{{/* Where the operator listens for agents. */}}
{{- define "rose.syncAddress" -}}
rose-operator.{{ .Release.Namespace }}.svc:7443
{{- end }}

{{- define "rose.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
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
