{{- /* Parts of both pods. Each is called with the values of its process: .Values.nodePlugin or .Values.controller. */ -}}

{{- define "tessera.network" -}}
{{- if .hostNetwork -}}
hostNetwork: true
# Otherwise a pod on the host's network asks the host's name servers, which know no service.
dnsPolicy: ClusterFirstWithHostNet
{{- else -}}
dnsPolicy: ClusterFirst
{{- end }}
{{- end -}}

{{- define "tessera.scheduling" -}}
{{- with .priorityClassName -}}
priorityClassName: {{ quote . }}
{{ end -}}
{{- with .nodeSelector -}}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{ end -}}
{{- with .tolerations -}}
tolerations:
  {{- toYaml . | nindent 2 }}
{{ end -}}
{{- end -}}

{{- define "tessera.env" -}}
env:
  {{- range $name, $path := dict "NODE_NAME" "spec.nodeName" "POD_NAME" "metadata.name" "POD_NAMESPACE" "metadata.namespace" "POD_UID" "metadata.uid" }}
  - name: {{ $name }}
    valueFrom:
      fieldRef:
        fieldPath: {{ $path }}
  {{- end }}
{{- end -}}

{{- /* What both commands are told; extraArgs come last, so that they win. */ -}}
{{- define "tessera.commonArgs" -}}
{{- if .metricsPort -}}
- --metrics-address=:{{ int .metricsPort }}
{{ end -}}
{{- if .healthPort -}}
- --health-address=:{{ int .healthPort }}
{{ end -}}
- --log-format=json
- --log-level={{ .logLevel }}
{{- range .extraArgs }}
- {{ quote . }}
{{- end }}
{{- end -}}

{{- define "tessera.ports" -}}
{{- if or .metricsPort .healthPort -}}
ports:
  {{- if .metricsPort }}
  - name: metrics
    containerPort: {{ int .metricsPort }}
    protocol: TCP
  {{- end }}
  {{- if .healthPort }}
  - name: health
    containerPort: {{ int .healthPort }}
    protocol: TCP
  {{- end }}
{{ end -}}
{{- end -}}

{{- define "tessera.probes" -}}
{{- if .healthPort -}}
# A slow start is no fault: GPUs without persistence mode take seconds each to answer for the first time.
startupProbe:
  httpGet: {path: /livez, port: health}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 90
# Slow to give up: who starts a process anew ends the calls it is busy with.
livenessProbe:
  httpGet: {path: /livez, port: health}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: health}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
{{ end -}}
{{- end -}}
