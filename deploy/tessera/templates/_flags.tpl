{{- /* What node plugin and controller have to be told beyond their defaults. */ -}}
{{- define "tessera.flags" -}}
{{- if ne .Release.Namespace "tessera" }} --namespace {{ .Release.Namespace }}{{ end -}}
{{- if ne .Values.driverName "gpu.tessera.dev" }} --driver-name {{ .Values.driverName }}{{ end -}}
{{- end -}}
