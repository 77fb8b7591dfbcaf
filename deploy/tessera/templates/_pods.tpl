{{- /* Parts of both pods. Call them with the values of the process: .Values.nodePlugin or .Values.controller. */ -}}

{{- define "tessera.network" -}}
{{- if .hostNetwork -}}
hostNetwork: true
# By default a pod on the host network uses the name servers of the host, which do not resolve Services.
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
  {{- with .extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- /* Arguments of both commands; extraArgs are last, so that they override the others. */ -}}
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
{{- if or .metricsPort .healthPort .webAddress -}}
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
  {{- if .webAddress }}
  - name: web
    containerPort: {{ regexFind "[0-9]+$" .webAddress }}
    protocol: TCP
  {{- end }}
{{ end -}}
{{- end -}}

{{- define "tessera.probes" -}}
{{- if .healthPort -}}
# Allows a slow start: each GPU without persistence mode takes seconds to initialise.
startupProbe:
  httpGet: {path: /livez, port: health}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 90
# Tolerant, because a restart interrupts the calls in progress.
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

{{- /* The nodes with GPUs, for both DaemonSets. */ -}}
{{- define "tessera.gpuNodes" -}}
{{- if .Values.nodePlugin.affinity }}
affinity:
  {{- toYaml .Values.nodePlugin.affinity | nindent 2 }}
{{- else if not (include "tessera.simulated" .) }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      # One matching term is sufficient.
      nodeSelectorTerms:
        # Set by an administrator: kubectl label node NODE gpu.tessera.dev/node=true
        - matchExpressions: [{key: gpu.tessera.dev/node, operator: In, values: ["true"]}]
        # NVIDIA GPU Feature Discovery and GPU Operator.
        - matchExpressions: [{key: nvidia.com/gpu.present, operator: In, values: ["true"]}]
        # Node Feature Discovery: any NVIDIA PCI device, a 3D controller, a display controller.
        - matchExpressions: [{key: feature.node.kubernetes.io/pci-10de.present, operator: In, values: ["true"]}]
        - matchExpressions: [{key: feature.node.kubernetes.io/pci-0302_10de.present, operator: In, values: ["true"]}]
        - matchExpressions: [{key: feature.node.kubernetes.io/pci-0300_10de.present, operator: In, values: ["true"]}]
        # GKE.
        - matchExpressions: [{key: cloud.google.com/gke-accelerator, operator: Exists}]
{{- end }}
{{- end -}}

{{- /* "true" if a setting shares GPUs by MPS, else empty: the flag --shared, or a configuration of nodes. */ -}}
{{- define "tessera.sharesByMps" -}}
{{- $texts := list }}
{{- range .Values.nodePlugin.extraArgs }}
{{- if hasPrefix "--shared=" . }}{{ $texts = append $texts . }}{{ end }}
{{- end }}
{{- range .Values.nodeConfigs }}
{{- $texts = append $texts ((.settings | default dict).shared | default "") }}
{{- end }}
{{- if and .Values.nodePlugin.enabled (regexMatch "=\\s*mps\\s*(,|$)" (join "," $texts)) }}true{{ end -}}
{{- end -}}

{{- /* The same path on the host, in both pods and in containers: MPS names it in what its processes send each other. */ -}}
{{- define "tessera.mpsDirectory" -}}
/run/tessera-mps
{{- end -}}
