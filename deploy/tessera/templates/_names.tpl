{{- /* What both workloads have in common. A cluster has one release, so that names need no prefix of it. */ -}}

{{- /* Labels that never change: a selector can't. Called with (list $ "node"). */ -}}
{{- define "tessera.selector" -}}
app.kubernetes.io/name: tessera
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "tessera.labels" -}}
{{ include "tessera.selector" . }}
app.kubernetes.io/instance: {{ quote (index . 0).Release.Name }}
app.kubernetes.io/version: {{ quote (index . 0).Chart.AppVersion }}
app.kubernetes.io/managed-by: {{ quote (index . 0).Release.Service }}
{{- end -}}

{{- /* A digest says exactly which image, so it goes before a tag. */ -}}
{{- define "tessera.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tessera.gpus" -}}
{{ .Values.gpus | default "nvml" }}
{{- end -}}

{{- /* Not empty where GPUs are simulated. */ -}}
{{- define "tessera.simulated" -}}
{{- if hasPrefix "sim:" (include "tessera.gpus" .) }}true{{ end -}}
{{- end -}}
