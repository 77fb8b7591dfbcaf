{{- /* Flags of the commands for values that differ from their defaults. */ -}}
{{- define "tessera.flags" -}}
{{- if ne .Release.Namespace "tessera" }} --namespace {{ .Release.Namespace }}{{ end -}}
{{- if ne .Values.driverName "gpu.tessera.dev" }} --driver-name {{ .Values.driverName }}{{ end -}}
{{- end -}}
