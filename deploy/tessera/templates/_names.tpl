{{- /* Parts of both workloads. A cluster has one release, so names have no release prefix. */ -}}

{{- /* Labels for selectors, which are immutable. Called with (list $ "node"). */ -}}
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

{{- /* A digest identifies the image exactly and takes precedence over the tag. */ -}}
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

{{- /* "true" if GPUs are simulated, else empty. */ -}}
{{- define "tessera.simulated" -}}
{{- if hasPrefix "sim:" (include "tessera.gpus" .) }}true{{ end -}}
{{- end -}}
